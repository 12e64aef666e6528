// Operations: the running ones of all visible objects, and their steps.
import { html, useEffect, useState } from "./view.js";
import { get } from "./api.js";
import { artifacts, instances, networks, objectsOf, useCollection, useEvents } from "./live.js";
import { link } from "./router.js";
import { Progress, State, toneOf } from "./parts.js";
import { ObjectLink } from "./events.js";
import { age } from "./format.js";

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

/** Returns `{operation, target}` of objects in a state of the given tones. Read again when an object changes. */
export function useOperations(tones, limit) {
  const vms = useCollection(instances).records;
  const nets = useCollection(networks).records;
  const images = useCollection(artifacts).records;
  const targets = candidates(
    [
      ["instance", vms],
      ["network", nets],
      ["artifact", images],
    ],
    tones,
  ).slice(0, limit);
  const key = targets.map((target) => `${target.handle.op_uuid}:${target.state}`).join();
  const [found, setFound] = useState([]);
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
          () => null,
        ),
      ),
    ).then((list) => current && setFound(list.filter(Boolean)));
    return () => {
      current = false;
    };
  }, [key, changes]);
  return found;
}

export const useRunning = () => useOperations(["busy"], MAX_RUNNING).filter(({ operation }) => isRunning(operation));

export const operationTitle = (operation) => (operation.tasks.at(-1) ?? operation.operation_type).replaceAll("_", " ");

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
      ${
        operation.progress
          ? html`
              <${Progress} label="Progress" done=${operation.progress.done} total=${operation.progress.total} />
            `
          : null
      }
    </li>
  `;
}
