// Overview: capacity, problems, running operations and recent events.
import { html, useEffect, useRef, useState } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import {
  isRoutine,
  artifacts,
  instances,
  networks,
  nodes,
  recent,
  useCollection,
  useEvents,
  useLive,
} from "../lib/live.js";
import { link } from "../lib/router.js";
import { Empty, Failure, Heading, Panel, State, toneOf } from "../lib/parts.js";
import { EventRow, ObjectLink } from "../lib/events.js";
import { OperationRow, useRunning } from "../lib/operations.js";
import { ShortTable, compare } from "../lib/table.js";
import { CpuMeter, MemoryMeter, nodeState } from "../lib/nodes.js";
import { CAPACITY, QuotaTable, QuotaUsage, quotaTitle } from "../lib/quotas.js";
import { bytes, megabytes, number } from "../lib/format.js";

const MAX_EVENTS = 14;
/** Earlier events that are read; some of them are routine, and are not shown. */
const EARLIER_EVENTS = 60;
const MAX_PROBLEMS = 12;
const MAX_NAMESPACES = 10;
/** Milliseconds without a change after which capacity is read again: one read for a burst of events. */
const SETTLED = 300;

/** Returns what needs attention, as `{type, uuid, name, text}`. */
function problemsOf(nodeList, lists) {
  const found = [];
  for (const node of nodeList) {
    if (node.state !== "created")
      found.push({ type: "node", uuid: node.name, name: node.name, text: `state ${node.state}` });
    else if (node.degraded)
      found.push({ type: "node", uuid: node.name, name: node.name, text: `degraded: ${node.degraded.reason}` });
  }
  for (const [type, records] of lists) {
    for (const record of records) {
      const state = type === "instance" && record.state === "created" ? record.power_state : record.state;
      if (toneOf(state) === "bad")
        found.push({ type, uuid: record.uuid, name: record.name, text: record.error_message || `state ${state}` });
    }
  }
  return found;
}

function NodeTable({ nodeList, resources }) {
  const row = (node) => {
    const own = resources?.per_node?.[node.name];
    return html`
      <tr key=${node.name}>
        <td><a class="row-name" href=${link("nodes", node.name)}>${node.name}</a></td>
        <td><${State} value=${nodeState(node)} /></td>
        <td><${CpuMeter} node=${node} own=${own} /></td>
        <td><${MemoryMeter} node=${node} own=${own} /></td>
        <td class="wide end">${bytes(own?.disk_available)}</td>
      </tr>
    `;
  };
  return html`
    <${ShortTable}
      columns=${["Node", "State", "CPUs", "Memory", ["Free disk", "wide end"]]}
      records=${[...nodeList].sort((a, b) => compare(a.name, b.name))}
      row=${row}
      empty="There are no nodes."
    />
  `;
}

/** Calls `run` after a burst of changes of `values`, but not for the first ones. */
function useSettled(run, values) {
  const isFirst = useRef(true);
  useEffect(() => {
    if (isFirst.current) {
      isFirst.current = false;
      return undefined;
    }
    const timer = setTimeout(run, SETTLED);
    return () => clearTimeout(timer);
  }, values);
}

/** What a namespace uses of its quotas. Usage changes with its instances, and limits with events of the namespace. */
function NamespaceRow({ sum }) {
  const path = `/auth/namespaces/${seg(sum.name)}/quotas`;
  const quotas = useLive(() => get(path), [`namespace/${sum.name}`], [path]);
  useSettled(quotas.reload, [sum.instances, sum.cpus, sum.memory, sum.disk]);
  const cell = (name) => {
    const quota = quotas.value?.find((other) => other.name === name);
    return html`
      <td key=${name} class=${name === "disk_gb" ? "wide" : ""}>
        ${
          quota
            ? html`
                <${QuotaUsage} quota=${quota} label=${`${quotaTitle(name)} of ${sum.name}`} />
              `
            : "–"
        }
      </td>
    `;
  };
  return html`
    <tr>
      <td><a class="row-name" href=${link("namespaces", sum.name)}>${sum.name}</a></td>
      ${CAPACITY.map(cell)}
    </tr>
  `;
}

/** The namespaces with instances, the largest first. */
function NamespaceTable({ vms }) {
  const sums = new Map();
  for (const vm of vms) {
    const sum = sums.get(vm.namespace) ?? { name: vm.namespace, instances: 0, cpus: 0, memory: 0, disk: 0 };
    sum.instances++;
    sum.cpus += vm.cpus;
    sum.memory += vm.memory;
    for (const disk of vm.disk_spec) sum.disk += disk.size ?? 0;
    sums.set(vm.namespace, sum);
  }
  return html`
    <${ShortTable}
      columns=${["Namespace", ...CAPACITY.map((name) => [quotaTitle(name), name === "disk_gb" ? "wide" : ""])]}
      records=${[...sums.values()].sort((a, b) => b.memory - a.memory).slice(0, MAX_NAMESPACES)}
      row=${(sum) => html`
        <${NamespaceRow} key=${sum.name} sum=${sum} />
      `}
      empty="No namespace has instances."
    />
  `;
}

export default function Overview({ session, admin }) {
  const vms = useCollection(instances);
  const nets = useCollection(networks);
  const images = useCollection(artifacts);
  const hosts = useCollection(nodes, admin);
  const [, tick] = useState(0);
  useEvents(() => tick((n) => n + 1));
  const resources = useLive(
    () => (admin ? get("/admin/resources") : get(`/auth/namespaces/${seg(session.namespace)}/quotas`)),
    [],
    [admin],
  );
  // Capacity changes with instances and nodes.
  useSettled(resources.reload, [vms.records, hosts.records]);
  const earlier = useLive(
    () =>
      admin ? get(`/auth/namespaces/${seg(session.namespace)}/events?limit=${EARLIER_EVENTS}`) : [],
    [],
    [admin],
  );
  const { entries: running, error: runningError } = useRunning();

  const problems = problemsOf(hosts.records, [
    ["instance", vms.records],
    ["network", nets.records],
    ["artifact", images.records],
  ]);
  const on = vms.records.filter((vm) => vm.state === "created" && vm.power_state === "on").length;
  const seen = new Set(recent.map((event) => event.event_uuid));
  const events = [
    ...recent.map((event) => [event, event.live]),
    ...(earlier.value ?? []).filter((event) => !seen.has(event.event_uuid)).map((event) => [event, false]),
  ]
    .filter(([event]) => !isRoutine(event))
    .slice(0, MAX_EVENTS);
  const stat = (href, name, value, extra) => html`
    <a href=${href}>
      <div class="value">
        ${value}
        ${
          extra
            ? html`
                <small>${extra}</small>
              `
            : null
        }
      </div>
      <div class="name">${name}</div>
    </a>
  `;
  const active = hosts.records.filter((node) => node.state === "created").length;
  return html`
    <${Heading} title="Overview"><a class="button primary" href="#/instances/new">Create instance</a><//>
    <${Failure} error=${vms.error ?? resources.error} />
    <div class="panel stats">
      ${stat("#/instances", "Instances running", vms.loaded ? number(on) : "–", vms.loaded ? `of ${number(vms.records.length)}` : "")}
      ${admin ? stat("#/nodes", "Nodes ready", hosts.loaded ? number(active) : "–", hosts.loaded ? `of ${number(hosts.records.length)}` : "") : null}
      ${admin && resources.value?.total ? stat("#/nodes", "CPUs free", number(Math.round(resources.value.total.cpu_available))) : null}
      ${admin && resources.value?.total ? stat("#/nodes", "Memory free", megabytes(resources.value.total.ram_available)) : null}
      ${stat("#/networks", "Networks", nets.loaded ? number(nets.records.length) : "–")}
      ${stat("#/artifacts", "Artifacts", images.loaded ? number(images.records.length) : "–")}
    </div>
    <div class="grid">
      <div class="stack two-thirds">
        ${
          admin
            ? html`
                <${Panel} title="Nodes"><${NodeTable} nodeList=${hosts.records} resources=${resources.value} /><//>
                <${Panel}
                  title="Namespaces"
                  actions=${html`
                    <a href="#/namespaces">All namespaces</a>
                  `}
                >
                  <${NamespaceTable} vms=${vms.records} />
                <//>
              `
            : html`
                <${Panel} title="Quotas">
                  <${QuotaTable} quotas=${Array.isArray(resources.value) ? resources.value : []} />
                <//>
              `
        }
        <${Panel}
          title="Recent events"
          actions=${html`
            <a href="#/events">All events</a>
          `}
        >
          ${
            events.length
              ? html`
                  <ul class="events">
                    ${events.map(
                      ([event, fresh]) => html`
                        <${EventRow} key=${event.event_uuid} event=${event} objects fresh=${fresh} />
                      `,
                    )}
                  </ul>
                `
              : html`
                  <${Empty}>No events yet.<//>
                `
          }
        <//>
      </div>
      <div class="stack third">
        <${Panel} title="Problems">
          ${
            problems.length === 0
              ? html`
                  <${Empty}>${vms.loaded ? "Nothing needs attention." : "Loading…"}<//>
                `
              : html`
                  <ul class="problems">
                    ${problems.slice(0, MAX_PROBLEMS).map(
                      (problem) => html`
                        <li key=${problem.type + problem.uuid}>
                          <${ObjectLink} ...${problem} />
                          <span class="bad-text">${problem.text}</span>
                        </li>
                      `,
                    )}
                  </ul>
                `
          }
          ${
            problems.length > MAX_PROBLEMS
              ? html`
                  <p class="empty">and ${problems.length - MAX_PROBLEMS} more</p>
                `
              : null
          }
        <//>
        <${Panel}
          title="Running operations"
          actions=${html`
            <a href="#/operations">All operations</a>
          `}
        >
          <${Failure} error=${runningError} />
          ${
            running.length === 0
              ? html`
                  <${Empty}>No operation is running.<//>
                `
              : html`
                  <ul class="problems">
                    ${running.map(
                      (entry) => html`
                        <${OperationRow} key=${entry.operation.uuid} ...${entry} />
                      `,
                    )}
                  </ul>
                `
          }
        <//>
      </div>
    </div>
  `;
}
