// The nodes of the cluster.
import { html, useMemo, useState } from "../lib/view.js";
import { get } from "../lib/api.js";
import { nodes, useCollection, useLive } from "../lib/live.js";
import { link } from "../lib/router.js";
import { Failure, Heading, Loading, State, Time } from "../lib/parts.js";
import { CpuMeter, MemoryMeter, nodeState, roles } from "../lib/nodes.js";
import { Rebalance } from "../lib/rebalance.js";
import { Table } from "../lib/table.js";
import { bytes } from "../lib/format.js";

export default function Nodes() {
  const { records, loaded, error } = useCollection(nodes);
  const { value: resources, error: failed } = useLive(
    () => get("/admin/resources"),
    records.map((node) => `node/${node.uuid}`),
    [],
    { measured: true },
  );
  const [rebalancing, setRebalancing] = useState(false);
  const columns = useMemo(() => {
    const own = (node) => resources?.per_node?.[node.name];
    return [
      { id: "name", title: "Name", value: (node) => node.name },
      {
        id: "state",
        title: "State",
        value: nodeState,
        cell: (node) => html`
          <${State} value=${nodeState(node)} />
        `,
        width: "minmax(116px, .7fr)",
        phone: "116px",
      },
      {
        id: "cpus",
        title: "CPUs",
        value: (node) => own(node)?.cpu_available,
        cell: (node) => html`
          <${CpuMeter} node=${node} own=${own(node)} />
        `,
      },
      {
        id: "memory",
        title: "Memory",
        value: (node) => own(node)?.ram_available,
        cell: (node) => html`
          <${MemoryMeter} node=${node} own=${own(node)} />
        `,
        kind: "wide",
        width: "minmax(0, 1.3fr)",
      },
      {
        id: "disk",
        title: "Free disk",
        value: (node) => own(node)?.disk_available,
        cell: (node) => bytes(own(node)?.disk_available),
        kind: "wide end",
        width: "84px",
      },
      { id: "roles", title: "Roles", value: (node) => roles(node).join(", "), kind: "wide", width: "minmax(0, 1.5fr)" },
      {
        id: "seen",
        title: "Last check-in",
        value: (node) => node.lastseen,
        cell: (node) => html`
          <${Time} value=${node.lastseen} />
        `,
        kind: "wide",
        width: "100px",
      },
    ];
  }, [resources]);
  return html`
    <${Heading} title="Nodes">
      <button type="button" onClick=${() => setRebalancing(true)}>Rebalance</button>
    <//>
    <${Failure} error=${error ?? failed} retry=${() => nodes.load()} />
    ${
      loaded || records.length
        ? html`
            <${Table}
              label="Nodes"
              records=${records}
              columns=${columns}
              keyOf=${(node) => node.name}
              href=${(node) => link("nodes", node.name)}
              empty="There are no nodes."
            />
          `
        : error
          ? null
          : html`
              <${Loading} />
            `
    }
    ${
      rebalancing &&
      html`
        <${Rebalance} close=${() => setRebalancing(false)} />
      `
    }
  `;
}
