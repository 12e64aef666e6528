// What pages show of nodes: roles, state, capacity.
import { html } from "./view.js";
import { Meter } from "./parts.js";
import { megabytes, number } from "./format.js";

export const roles = (node) =>
  [
    node.is_hypervisor && "hypervisor",
    node.is_network_node && (node.is_active_network_node ? "active network node" : "network node"),
    node.is_cluster_maintainer && "maintainer",
  ].filter(Boolean);

/** Returns the state of a node as one word: why it gets no new instances, once it is created. */
export function nodeState(node) {
  if (node.state !== "created") return node.state;
  if (node.degraded) return "degraded";
  if (node.cordon) return node.cordon.reason === "drain" ? "draining" : "maintenance";
  return "ready";
}

/** Returns whether the host of a node may be declared dead. */
export const isLost = (node) => ["missing", "error", "stopped"].includes(node.state);

/** The CPUs of a node. `own` is its part of the resources of the cluster, if known. */
export const CpuMeter = ({ node, own }) =>
  own
    ? html`
        <${Meter}
          label=${`CPUs of ${node.name}`}
          used=${Math.max(0, own.cpu_max - own.cpu_available)}
          total=${own.cpu_max}
          text=${`${number(Math.round(own.cpu_available))} free`}
        />
      `
    : "–";

/** The memory of a node. */
export const MemoryMeter = ({ node, own }) =>
  own
    ? html`
        <${Meter}
          label=${`Memory of ${node.name}`}
          used=${own.ram_max - own.ram_available}
          total=${own.ram_max}
          text=${`${megabytes(own.ram_available)} free`}
        />
      `
    : "–";
