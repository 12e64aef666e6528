// One node: capacity, limits, instances, events, removal.
import { html, useEffect, useState } from "../lib/view.js";
import { del, get, post, seg } from "../lib/api.js";
import { instances, useCollection, useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import {
  ConfirmDelete,
  CopyId,
  Empty,
  Facts,
  Failure,
  Heading,
  InstanceState,
  Meter,
  Panel,
  State,
  Time,
  toast,
  Unloaded,
} from "../lib/parts.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { nodeState, roles } from "./nodes.js";
import { bytes, fullTime, megabytes } from "../lib/format.js";

export default function Node({ route }) {
  const reference = route.parts[1];
  const path = `/nodes/${seg(reference)}`;
  // Events name the node by its UUID.
  const [uuid, setUuid] = useState("");
  const { value: node, error, reload } = useLive(() => get(path), [`node/${uuid}`], [path]);
  const name = node?.name ?? reference;
  useEffect(() => {
    if (node) setUuid(node.uuid);
  }, [node?.uuid]);
  const { value: resources } = useLive(() => get("/admin/resources"), [`node/${uuid}`], [path], { measured: true });
  const vms = useCollection(instances).records.filter((vm) => vm.node === name);
  const [asking, setAsking] = useState(null);
  if (!node)
    return html`
      <${Unloaded} title="Node" up=${["Nodes", "#/nodes"]} error=${error} retry=${reload} />
    `;
  const own = resources?.per_node?.[name];
  const lost = ["missing", "error", "stopped"].includes(node.state);
  const evacuate = {
    title: `Evacuate ${name}?`,
    verb: "Evacuate",
    items: [`the VMs of ${vms.length} instances on ${name}: they start on other nodes, from their last stored disks`],
    word: name,
    kept: "Only confirm this if the host does not run: else its VMs run twice until it is fenced.",
    run: async () => {
      const list = await post(`${path}/evacuate`, { dead: true });
      toast(`Evacuating ${list.length} instances.`);
    },
  };
  const remove = {
    title: `Delete ${name}?`,
    items: [`the node ${name}`, ...vms.map((vm) => `the instance ${vm.name}`)],
    word: name,
    run: async () => {
      await del(path);
      go("/nodes");
    },
  };
  return html`
    <${Heading}
      title=${name}
      up=${["Nodes", "#/nodes"]}
      status=${html`
        <${State} value=${nodeState(node)} />
      `}
    >
      ${
        lost
          ? html`
              <button type="button" onClick=${() => setAsking(evacuate)}>Evacuate</button>
            `
          : null
      }
      <button type="button" class="danger" onClick=${() => setAsking(remove)}>Delete</button>
    <//>
    ${
      node.degraded
        ? html`
            <div class="failure" role="alert">
              <p>Degraded since ${fullTime(node.degraded.since)}: ${node.degraded.reason}</p>
            </div>
          `
        : null
    }
    <${Failure} error=${error} retry=${reload} />
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel} title="Summary">
          <${Facts}
            rows=${[
              [
                "Address",
                html`
                  <code>${node.ip}</code>
                `,
              ],
              ["Roles", roles(node).join(", ")],
              ["Release", node.release],
              [
                "Last check-in",
                html`
                  <${Time} value=${node.lastseen} />
                `,
              ],
              [
                "Started",
                node.started
                  ? html`
                      <${Time} value=${node.started} />
                    `
                  : null,
              ],
              ["Clock ahead by", Math.abs(node.clock_skew ?? 0) > 0.05 ? `${node.clock_skew.toFixed(3)} s` : null],
              ["Epoch", node.epoch],
              [
                "UUID",
                html`
                  <${CopyId} value=${node.uuid} />
                `,
              ],
            ]}
          />
        <//>
        <${Panel} title="Instances">
          ${
            vms.length === 0
              ? html`
                  <${Empty}>No instance runs on this node.<//>
                `
              : html`
                  <div class="scroll">
                    <table>
                      <thead>
                        <tr>
                          <th>Name</th>
                          <th>State</th>
                          <th>CPUs</th>
                          <th>Memory</th>
                        </tr>
                      </thead>
                      <tbody>
                        ${vms.slice(0, 200).map(
                          (vm) => html`
                            <tr key=${vm.uuid}>
                              <td><a class="row-name" href=${link("instances", vm.uuid)}>${vm.name}</a></td>
                              <td><${InstanceState} instance=${vm} /></td>
                              <td>${vm.cpus}</td>
                              <td>${megabytes(vm.memory)}</td>
                            </tr>
                          `,
                        )}
                      </tbody>
                    </table>
                  </div>
                  ${
                    vms.length > 200
                      ? html`
                          <p class="empty">
                            <a href=${`#/instances?filter=node:${encodeURIComponent(name)}`}>
                              All ${vms.length} instances
                            </a>
                          </p>
                        `
                      : null
                  }
                `
          }
        <//>
        <${Timeline} path=${`${path}/events`} type="node" uuid=${node.uuid} />
      </div>
      <div class="stack third">
        ${
          own
            ? html`
                <${Panel} title="Capacity">
                  <div class="body stack">
                    <div>
                      <span class="hint">CPUs</span>
                      <${Meter}
                        label="CPUs"
                        used=${own.cpu_max - own.cpu_available}
                        total=${own.cpu_max}
                        text=${`${Math.round(own.cpu_available)} free, ${own.cpu_max} threads`}
                      />
                    </div>
                    <div>
                      <span class="hint">Memory</span>
                      <${Meter}
                        label="Memory"
                        used=${own.ram_max - own.ram_available}
                        total=${own.ram_max}
                        text=${`${megabytes(own.ram_available)} of ${megabytes(own.ram_max)} free`}
                      />
                    </div>
                    <p>Free disk: ${bytes(own.disk_available)}</p>
                    <p>
                      ${`Load: ${[own.cpu_load_1, own.cpu_load_5, own.cpu_load_15].map((load) => load.toFixed(2)).join(", ")}`}
                    </p>
                  </div>
                <//>
              `
            : null
        }
        ${
          Object.keys(node.limits ?? {}).length
            ? html`
                <${Panel} title="Limits"><${Facts} rows=${Object.entries(node.limits)} /><//>
              `
            : null
        }
        <${Metadata} path=${path} values=${node.metadata} reload=${reload} />
      </div>
    </div>
    ${
      asking
        ? html`
            <${ConfirmDelete} ...${asking} close=${() => setAsking(null)} />
          `
        : null
    }
  `;
}
