// Operations that run or failed, found through the objects that they change.
import { html } from "../lib/view.js";
import { get } from "../lib/api.js";
import { nodes, useCollection, useLive } from "../lib/live.js";
import { Heading } from "../lib/parts.js";
import { OperationPanel } from "../lib/operation-table.js";
import { isRunning, useOperations } from "../lib/operations.js";

const MAX_SHOWN = 100;
const MAX_OF_OBJECT = 20;

/** Reads the operations on nodes that are drained, and those on the cluster itself, whose object is the namespace `system`. */
function useClusterOperations(admin) {
  const draining = useCollection(nodes, admin).records.filter((node) => node.cordon?.reason === "drain");
  const targets = admin ? [["namespace", "system"], ...draining.map((node) => ["node", node.uuid])] : [];
  const read = ([type, uuid]) =>
    get(`/clusteroperations?target_object_type=${type}&target_uuid=${uuid}&limit=${MAX_OF_OBJECT}`);
  return useLive(
    async () => (await Promise.all(targets.map(read))).flat().sort((a, b) => b.created - a.created),
    targets.map((target) => target.join("/")),
    [targets.join()],
  );
}

/** Returns records and the error of reading them as a result of `useLive`. */
const result = (records, error) => ({ value: error && records.length === 0 ? undefined : records, error });

export default function Operations({ admin }) {
  const operations = ({ entries }) => entries.map(({ operation }) => operation);
  const changing = useOperations(["busy"], MAX_SHOWN);
  const failing = useOperations(["bad"], MAX_SHOWN);
  const busy = operations(changing).filter(isRunning);
  const cluster = useClusterOperations(admin);
  const running = (cluster.value ?? []).filter(isRunning);
  return html`
    <${Heading} title="Operations" />
    <${OperationPanel}
      title="Running"
      live=${result([...running, ...busy], changing.error)}
      withObject
      empty="No operation is running."
    />
    <${OperationPanel}
      title="Last operation of objects in an error state"
      live=${result(operations(failing), failing.error)}
      withObject
      empty="No object is in an error state."
    />
    ${
      admin &&
      html`
        <${OperationPanel}
          title="Cluster and drained nodes"
          live=${cluster}
          withObject
          empty="The cluster was not rebalanced, and no node is drained."
        />
      `
    }
    <p class="hint">Every instance, network, artifact and node lists all of its operations on its own page.</p>
  `;
}
