// The nodes of the cluster.
import { html, useMemo } from "../lib/view.js";
import { get } from "../lib/api.js";
import { nodes, useCollection, useLive } from "../lib/live.js";
import { link } from "../lib/router.js";
import { Failure, Heading, Loading, Meter, State, Time } from "../lib/parts.js";
import { Table } from "../lib/table.js";
import { bytes, megabytes } from "../lib/format.js";

export const roles = (node) =>
  [
    node.is_hypervisor && "hypervisor",
    node.is_network_node && (node.is_active_network_node ? "active network node" : "network node"),
    node.is_cluster_maintainer && "maintainer",
  ].filter(Boolean);
export const nodeState = (node) => (node.state === "created" ? (node.degraded ? "degraded" : "ready") : node.state);

export default function Nodes() {
  const { records, loaded, error } = useCollection(nodes);
  const { value: resources, error: failed } = useLive(
    () => get("/admin/resources"),
    records.map((node) => `node/${node.uuid}`),
    [],
    { measured: true },
  );
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
        width: "minmax(90px, .7fr)",
        phone: "90px",
      },
      {
        id: "cpus",
        title: "CPUs",
        value: (node) => own(node)?.cpu_available,
        cell: (node) =>
          own(node) &&
          html`
            <${Meter}
              label=${`CPUs of ${node.name}`}
              used=${own(node).cpu_max - own(node).cpu_available}
              total=${own(node).cpu_max}
              text=${`${Math.round(own(node).cpu_available)} free`}
            />
          `,
      },
      {
        id: "memory",
        title: "Memory",
        value: (node) => own(node)?.ram_available,
        cell: (node) =>
          own(node) &&
          html`
            <${Meter}
              label=${`Memory of ${node.name}`}
              used=${own(node).ram_max - own(node).ram_available}
              total=${own(node).ram_max}
              text=${`${megabytes(own(node).ram_available)} free`}
            />
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
    <${Heading} title="Nodes" />
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
  `;
}
