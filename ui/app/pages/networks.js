// The list of networks, with a topology diagram, and the form that creates one.
import { html, useMemo, useState } from "../lib/view.js";
import { post, withField } from "../lib/api.js";
import { instances, networks, useCollection } from "../lib/live.js";
import { go, link, setQuery, useQueryState } from "../lib/router.js";
import { Action, Check, Dialog, Failure, Field, Heading, Loading, State } from "../lib/parts.js";
import { Table } from "../lib/table.js";
import { Topology } from "../lib/topology.js";
import { plural } from "../lib/format.js";

const services = (net) =>
  [net.provide_dhcp && "DHCP", net.provide_nat && "NAT", net.provide_dns && "DNS"].filter(Boolean).join(", ") || "–";

const FIELDS = ["name", "netblock", "namespace"];

function Create({ close, session, admin }) {
  const [form, setForm] = useState({
    name: "",
    netblock: "10.0.0.0/24",
    namespace: session.namespace,
    provide_dhcp: true,
    provide_nat: true,
    provide_dns: true,
  });
  const [error, setError] = useState(null);
  const input = (name) => ({ value: form[name], onInput: (event) => setForm({ ...form, [name]: event.target.value }) });
  const check = (name) => ({
    checked: form[name],
    onChange: (event) => setForm({ ...form, [name]: event.target.checked }),
  });
  const create = async () => {
    const { namespace, ...rest } = form;
    const network = await post("/networks", namespace === session.namespace ? rest : form);
    networks.touch(network.uuid);
    close();
    go(link("networks", network.uuid));
  };
  const shown = FIELDS.includes(error?.field);
  return html`
    <${Dialog} title="Create network" close=${close}>
      <div class="body">
        <${Field} label="Name" name="name" error=${error}>
          <input ...${input("name")} autofocus autocomplete="off" spellcheck="false" />
        <//>
        <${Field} label="Netblock" name="netblock" error=${error} hint="CIDR notation, from /8 to /29">
          <input ...${input("netblock")} autocomplete="off" spellcheck="false" />
        <//>
        ${
          admin
            ? html`
                <${Field} label="Namespace" name="namespace" error=${error}>
                  <input ...${input("namespace")} autocomplete="off" />
                <//>
              `
            : null
        }
        <${Check} label="Assign addresses by DHCP" ...${check("provide_dhcp")} />
        <${Check} label="Reach external networks through NAT" ...${check("provide_nat")} />
        <${Check} label="Resolve DNS names" ...${check("provide_dns")} />
        ${
          shown
            ? html`
                <p class="request-id">
                  Request
                  <code>${error.requestId}</code>
                </p>
              `
            : html`
                <${Failure} error=${error} />
              `
        }
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" run=${create} onError=${(failure) => setError(withField(failure, FIELDS))}>Create<//>
      </footer>
    <//>
  `;
}

export default function Networks({ route, session, admin }) {
  const { records, loaded, error } = useCollection(networks);
  const vms = useCollection(instances).records;
  const [creating, setCreating] = useState(route.query.has("create"));
  const [view, select] = useQueryState(route, "view", "list");
  const [filter, setFilter] = useState("");
  const used = useMemo(() => {
    const counts = new Map();
    for (const vm of vms)
      for (const nic of vm.interfaces) counts.set(nic.network_uuid, (counts.get(nic.network_uuid) ?? 0) + 1);
    return counts;
  }, [vms]);
  const columns = useMemo(
    () => [
      { id: "name", title: "Name", value: (net) => net.name, width: "minmax(0, 1.5fr)" },
      {
        id: "state",
        title: "State",
        value: (net) => net.state,
        cell: (net) => html`
          <${State} value=${net.state} />
        `,
        width: "minmax(90px, .8fr)",
        phone: "90px",
      },
      {
        id: "netblock",
        title: "Netblock",
        value: (net) => net.netblock,
        cell: (net) => html`
          <code>${net.netblock}</code>
        `,
      },
      {
        id: "namespace",
        title: "Namespace",
        value: (net) => net.namespace,
        cell: (net) => net.namespace ?? "–",
        kind: "wide",
      },
      { id: "services", title: "Services", value: services, kind: "wide" },
      {
        id: "interfaces",
        title: "Interfaces",
        value: (net) => used.get(net.uuid) ?? 0,
        kind: "wide end",
        width: "88px",
      },
    ],
    [used],
  );
  const shown = records.filter((net) =>
    `${net.name} ${net.netblock} ${net.namespace} ${net.state} ${net.uuid}`
      .toLowerCase()
      .includes(filter.toLowerCase()),
  );
  return html`
    <${Heading} title="Networks">
      <div class="switch" role="group" aria-label="View">
        <button type="button" aria-pressed=${view === "list"} onClick=${() => select("list")}>List</button>
        <button type="button" aria-pressed=${view === "topology"} onClick=${() => select("topology")}>Topology</button>
      </div>
      <button type="button" class="primary" onClick=${() => setCreating(true)}>Create network</button>
    <//>
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter networks"
        placeholder="Filter"
        value=${filter}
        onInput=${(event) => setFilter(event.target.value)}
      />
      <span class="count" role="status">${plural(shown.length, "network")}</span>
    </div>
    <${Failure} error=${error} retry=${() => networks.load()} />
    ${
      !loaded && !records.length
        ? error
          ? null
          : html`
              <${Loading} />
            `
        : view === "topology"
          ? html`
              <${Topology} networks=${shown} instances=${vms} />
            `
          : html`
              <${Table}
                label="Networks"
                records=${shown}
                columns=${columns}
                keyOf=${(net) => net.uuid}
                href=${(net) => link("networks", net.uuid)}
                empty="There are no networks."
              />
            `
    }
    ${
      creating
        ? html`
            <${Create}
              session=${session}
              admin=${admin}
              close=${() => {
                setCreating(false);
                setQuery({ create: "" });
              }}
            />
          `
        : null
    }
  `;
}
