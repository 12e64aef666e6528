// The list of instances.
import { html, useMemo, useState } from "../lib/view.js";
import { instances, useCollection } from "../lib/live.js";
import { link, setQuery } from "../lib/router.js";
import { Failure, Heading, InstanceState, Loading, instanceState } from "../lib/parts.js";
import { Thumbnail } from "../lib/thumbnails.js";
import { Table } from "../lib/table.js";
import { megabytes, plural } from "../lib/format.js";

const addresses = (instance) => instance.interfaces.flatMap((nic) => [nic.ipv4, nic.floating]).filter(Boolean);

const COLUMNS = [
  { id: "name", title: "Name", value: (vm) => vm.name, width: "minmax(0, 1.6fr)", phone: "minmax(0, 1.4fr)" },
  {
    id: "state",
    title: "State",
    value: instanceState,
    cell: (vm) => html`
      <${InstanceState} instance=${vm} />
    `,
    width: "minmax(90px, .9fr)",
    phone: "minmax(84px, .8fr)",
  },
  {
    id: "screen",
    title: "Screen",
    value: instanceState,
    cell: (vm) => html`
      <${Thumbnail} instance=${vm} />
    `,
    kind: "wide",
    width: "56px",
  },
  { id: "namespace", title: "Namespace", value: (vm) => vm.namespace, kind: "wide" },
  {
    id: "addresses",
    title: "Addresses",
    value: (vm) => addresses(vm)[0],
    cell: (vm) => addresses(vm).join(", ") || "–",
    width: "minmax(0, 1.4fr)",
  },
  { id: "node", title: "Node", value: (vm) => vm.node, cell: (vm) => vm.node ?? "–", kind: "wide" },
  { id: "cpus", title: "CPUs", value: (vm) => vm.cpus, kind: "wide end", width: "52px" },
  {
    id: "memory",
    title: "Memory",
    value: (vm) => vm.memory,
    cell: (vm) => megabytes(vm.memory),
    kind: "wide end",
    width: "84px",
  },
];

/** Returns whether an instance contains all words of the filter; `word:` limits to one field. */
function matches(vm, words) {
  return words.every((word) => {
    const [, field, text] = /^(state|node|namespace|name):(.*)$/.exec(word) ?? [];
    if (field)
      return String(field === "state" ? instanceState(vm) : (vm[field] ?? ""))
        .toLowerCase()
        .includes(text);
    return [vm.name, vm.uuid, vm.namespace, vm.node, instanceState(vm), ...addresses(vm)].some((value) =>
      value?.toLowerCase().includes(word),
    );
  });
}

export default function Instances({ route }) {
  const { records, loaded, error } = useCollection(instances);
  const [filter, setFilter] = useState(route.query.get("filter") ?? "");
  const shown = useMemo(() => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    return words.length ? records.filter((vm) => matches(vm, words)) : records;
  }, [records, filter]);
  const change = (event) => {
    setFilter(event.target.value);
    setQuery({ filter: event.target.value });
  };
  return html`
    <${Heading} title="Instances"><a class="button primary" href="#/instances/new">Create instance</a><//>
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter instances"
        placeholder="Filter: name, address, state:on, node:…"
        value=${filter}
        onInput=${change}
      />
      <span class="count" role="status">
        ${loaded ? "" : "Loading: "}${
          shown.length === records.length
            ? plural(records.length, "instance")
            : `${shown.length} of ${plural(records.length, "instance")}`
        }
      </span>
    </div>
    <${Failure} error=${error} retry=${() => instances.load()} />
    ${
      loaded || records.length
        ? html`
            <${Table}
              label="Instances"
              records=${shown}
              columns=${COLUMNS}
              keyOf=${(vm) => vm.uuid}
              href=${(vm) => link("instances", vm.uuid)}
              empty=${records.length ? "No instance matches the filter." : "There are no instances yet."}
            />
          `
        : error
          ? null
          : html`
              <${Loading} />
            `
    }
  `;
}
