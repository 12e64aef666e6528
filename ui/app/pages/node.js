// One node: capacity, limits, instances, events, removal.
import { html, useEffect, useState } from "../lib/view.js";
import { del, get, seg } from "../lib/api.js";
import { instances, useCollection, useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import {
  ConfirmDelete,
  CopyId,
  Facts,
  Failure,
  Heading,
  InstanceState,
  Panel,
  State,
  Time,
  Unloaded,
} from "../lib/parts.js";
import { NodeActions } from "../lib/node-actions.js";
import { OperationTable } from "../lib/operation-table.js";
import { ShortTable } from "../lib/table.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { CpuMeter, MemoryMeter, isLost, nodeState, roles } from "../lib/nodes.js";
import { bytes, fullTime, megabytes, plural } from "../lib/format.js";

const MAX_INSTANCES = 200;

/** Why a node gets no new instances by request, and how far its drain is. */
function Cordon({ node, count }) {
  const text =
    node.cordon.reason === "drain"
      ? count
        ? `${plural(count, "instance")} left to move`
        : "all instances have moved"
      : "its instances stay";
  return html`
    <div class="notice" role="status">
      <p>
        ${node.cordon.reason === "drain" ? "Draining" : "In maintenance"} since ${fullTime(node.cordon.since)}: ${text}.
        The node gets no new instances.
      </p>
    </div>
  `;
}

/** Returns what the host lacks: the checks that did not pass with what fixes them, and the other limits. */
const limits = ({ checks = [], limits = {} }) => [
  ...Object.entries(limits).filter(([, reason]) => !checks.some((check) => check.detail === reason)),
  ...checks.map(({ name, detail, affects, fix }) => [
    name,
    html`
      ${detail}
      <p class="hint">${`Affects ${affects}.`}</p>
      ${
        fix
          ? html`
              <code>${fix}</code>
            `
          : null
      }
    `,
  ]),
];

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
  const [dialog, setDialog] = useState(null);
  if (!node)
    return html`
      <${Unloaded} title="Node" up=${["Nodes", "#/nodes"]} error=${error} retry=${reload} />
    `;
  const own = resources?.per_node?.[name];
  const lost = isLost(node);
  const close = () => setDialog(null);
  const remove = () =>
    setDialog(html`
      <${ConfirmDelete}
        title=${`Delete ${name}?`}
        lead=${lost ? "You declare that this host is dead. This cannot be undone. It deletes:" : undefined}
        items=${[
          `the node ${name}`,
          ...(lost && vms.length
            ? [`${plural(vms.length, "instance")} end in error; evacuate the node first to restart them`]
            : []),
        ]}
        kept=${vms.length ? "Disks stay on the host. A node that is alive can be deleted once it is drained." : null}
        word=${name}
        run=${async () => {
          await del(`${path}${lost ? "?dead=true" : ""}`);
          go("/nodes");
        }}
        close=${close}
      />
    `);
  return html`
    <${Heading}
      title=${name}
      up=${["Nodes", "#/nodes"]}
      status=${html`
        <${State} value=${nodeState(node)} />
      `}
    >
      <${NodeActions} path=${path} node=${node} count=${vms.length} show=${setDialog} done=${reload} />
      <button type="button" class="danger" onClick=${remove}>Delete</button>
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
    ${
      node.cordon &&
      html`
        <${Cordon} node=${node} count=${vms.length} />
      `
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
              ["Self-fencing after", node.fencing_lease == null ? null : `${node.fencing_lease} s`],
              [
                "Shared storage",
                node.shared_storage &&
                  `${node.shared_storage.path}: ${node.shared_storage.problem ?? `${bytes(node.shared_storage.free)} free`}`,
              ],
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
          <${ShortTable}
            columns=${["Name", "State", "CPUs", "Memory"]}
            records=${vms.slice(0, MAX_INSTANCES)}
            row=${(vm) => html`
              <tr key=${vm.uuid}>
                <td><a class="row-name" href=${link("instances", vm.uuid)}>${vm.name}</a></td>
                <td><${InstanceState} instance=${vm} /></td>
                <td>${vm.cpus}</td>
                <td>${megabytes(vm.memory)}</td>
              </tr>
            `}
            empty="No instance runs on this node."
          />
          ${
            vms.length > MAX_INSTANCES &&
            html`
              <p class="empty">
                <a href=${`#/instances?filter=node:${encodeURIComponent(name)}`}>All ${vms.length} instances</a>
              </p>
            `
          }
        <//>
        <${OperationTable}
          path=${`/clusteroperations?target_object_type=node&target_uuid=${node.uuid}`}
          objects=${[`node/${node.uuid}`]}
        />
        <${Timeline} path=${`${path}/events`} type="node" uuid=${node.uuid} />
      </div>
      <div class="stack third">
        ${
          own
            ? html`
                <${Panel} title="Capacity">
                  <div class="body stack">
                    <div>
                      <span class="hint">CPUs: ${own.cpu_max} threads</span>
                      <${CpuMeter} node=${node} own=${own} />
                    </div>
                    <div>
                      <span class="hint">Memory: ${megabytes(own.ram_max)}</span>
                      <${MemoryMeter} node=${node} own=${own} />
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
          limits(node).length
            ? html`
                <${Panel} title="Limits of the host"><${Facts} rows=${limits(node)} /><//>
              `
            : null
        }
        <${Metadata} path=${path} values=${node.metadata} reload=${reload} />
      </div>
    </div>
    ${dialog}
  `;
}
