// Operations: the running ones of all visible objects, and their steps.
import { html, useEffect, useState } from "./view.js";
import { get, post, seg } from "./api.js";
import { artifacts, instances, networks, objectsOf, useCollection, useEvents, useLive } from "./live.js";
import { link } from "./router.js";
import { Action, Panel, Progress, State, toneOf } from "./parts.js";
import { ObjectLink } from "./events.js";
import { age, bytes } from "./format.js";

const MAX_RUNNING = 20;
const ENDED = ["complete", "error", "abort"];

export const isRunning = (operation) => !ENDED.includes(operation.state);
export const operationPath = (handle) => `/clusteroperations/${handle.op_type}/${handle.op_uuid}`;

/** Returns the objects whose state tells that an operation changes them, or that one failed. */
function candidates(lists, tones) {
  return lists.flatMap(([type, records]) =>
    records
      .filter((record) => record.last_cluster_operation && tones.includes(toneOf(record.state)))
      .map((record) => ({
        type,
        uuid: record.uuid,
        name: record.name,
        handle: record.last_cluster_operation,
        state: record.state,
      })),
  );
}

/**
 * Returns `entries`, each `{operation, target}`, of objects in a state of the given tones, and the first `error` of reading
 * them. Read again when an object changes.
 */
export function useOperations(tones, limit) {
  const lists = [
    ["instance", useCollection(instances)],
    ["network", useCollection(networks)],
    ["artifact", useCollection(artifacts)],
  ];
  const targets = candidates(
    lists.map(([type, { records }]) => [type, records]),
    tones,
  ).slice(0, limit);
  const key = targets.map((target) => `${target.handle.op_uuid}:${target.state}`).join();
  const [found, setFound] = useState({ entries: [], error: null });
  const [changes, setChanges] = useState(0);
  useEvents((event) => {
    if (objectsOf(event).some(({ uuid }) => targets.some((target) => target.handle.op_uuid === uuid)))
      setChanges((n) => n + 1);
  });
  useEffect(() => {
    let current = true;
    Promise.all(
      targets.map((target) =>
        get(operationPath(target.handle)).then(
          (operation) => ({ operation, target }),
          // The operation of an object that was deleted meanwhile.
          (error) => (error.status === 404 ? null : { error }),
        ),
      ),
    ).then((list) => {
      if (!current) return;
      const entries = list.filter((entry) => entry?.operation);
      setFound({ entries, error: list.find((entry) => entry?.error)?.error ?? null });
    });
    return () => {
      current = false;
    };
  }, [key, changes]);
  return { entries: found.entries, error: lists.find(([, { error }]) => error)?.[1].error ?? found.error };
}

export function useRunning() {
  const { entries, error } = useOperations(["busy"], MAX_RUNNING);
  return { entries: entries.filter(({ operation }) => isRunning(operation)), error };
}

/** Titles of operations whose last step does not tell what they do. */
const TITLES = {
  instance_start: "start instance",
  instance_remove_source: "migrate instance",
  instance_prepare_incoming: "prepare migration",
  node_migrate_instances: "drain node",
  cluster_migrate_instances: "rebalance cluster",
};

export function operationTitle(operation) {
  const last = operation.tasks.at(-1) ?? operation.operation_type;
  return TITLES[last] ?? last.replaceAll("_", " ");
}

const MIGRATION_STEPS = ["instance_prepare_incoming", "instance_migrate"];
const DRAIN_STEP = "node_migrate_instances";

/** The button that cancels an operation, if the API can cancel it. */
export function CancelOperation({ operation }) {
  const { tasks, target_uuid: target } = operation;
  const path = tasks.some((task) => MIGRATION_STEPS.includes(task))
    ? `/instances/${seg(target)}/migrate/cancel`
    : tasks.includes(DRAIN_STEP)
      ? `/nodes/${seg(target)}/undrain`
      : null;
  if (!path || !isRunning(operation)) return null;
  return html`
    <${Action} run=${() => post(path)}>Cancel ${tasks.includes(DRAIN_STEP) ? "drain" : "migration"}<//>
  `;
}

/** The transferred bytes of an operation, as a bar and as text. */
export function OperationProgress({ operation: { progress } }) {
  if (!progress) return null;
  return html`
    <${Progress} label="Progress" done=${progress.done} total=${progress.total} />
    <span class="muted">${bytes(progress.done)}${progress.total ? ` of ${bytes(progress.total)}` : ""}</span>
  `;
}

/** The last operation of an object while it runs. `object` is the type and id by which events name the object. */
export function InProgress({ handle, object }) {
  const { value: operation } = useLive(
    async () => (handle ? get(operationPath(handle)) : null),
    [object, `clusteroperation/${handle?.op_uuid}`],
    [handle?.op_uuid],
  );
  if (!operation || !isRunning(operation)) return null;
  return html`
    <${Panel}
      title="In progress"
      actions=${html`
        <${CancelOperation} operation=${operation} />
      `}
    >
      <div class="body stack">
        <span class="line-one">
          <a href=${link("operations", operation.operation_type, operation.uuid)}>${operationTitle(operation)}</a>
          <${State} value=${operation.state} />
        </span>
        <${OperationProgress} operation=${operation} />
      </div>
    <//>
  `;
}

export function OperationRow({ operation, target }) {
  return html`
    <li>
      <span class="line-one">
        <a href=${link("operations", operation.operation_type, operation.uuid)}>${operationTitle(operation)}</a>
        <${State} value=${operation.state} />
      </span>
      <span class="muted">
        <${ObjectLink} ...${target} />
        <span class="aside">${age(operation.created)}</span>
      </span>
      <${OperationProgress} operation=${operation} />
    </li>
  `;
}
