// Tables of operations.
import { html } from "./view.js";
import { get } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { State, Time } from "./parts.js";
import { ObjectLink } from "./events.js";
import { operationTitle } from "./operations.js";
import { TablePanel } from "./table.js";
import { duration } from "./format.js";

/** The operations in `live`, a result of `useLive`; with `withObject`, also what they change. */
export function OperationPanel({ title, live, withObject, empty }) {
  const row = (operation) => html`
    <tr key=${operation.uuid}>
      <td>
        <a href=${link("operations", operation.operation_type, operation.uuid)}>${operationTitle(operation)}</a>
      </td>
      ${
        withObject &&
        html`
          <td><${ObjectLink} type=${operation.target_object_type} uuid=${operation.target_uuid} /></td>
        `
      }
      <td>
        <${State} value=${operation.state} />
        ${
          operation.error_report &&
          html`
            <span class="muted block">${operation.error_report.message}</span>
          `
        }
      </td>
      <td><${Time} value=${operation.created} /></td>
      <td class="wide">${duration(Math.max(0, operation.updated - operation.created))}</td>
      <td class="wide">${operation.attempts}</td>
      <td class="wide">${operation.tasks_completed} of ${operation.tasks.length}</td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title=${title}
      live=${live}
      columns=${[
        "Operation",
        ...(withObject ? ["Object"] : []),
        "State",
        "Started",
        ["Took", "wide"],
        ["Attempts", "wide"],
        ["Steps", "wide"],
      ]}
      row=${row}
      empty=${empty}
    />
  `;
}

/** The operations of one object. */
export function OperationTable({ path, objects }) {
  const live = useLive(() => get(path), objects, [path]);
  return html`
    <${OperationPanel} title="Operations" live=${live} empty="No operations." />
  `;
}
