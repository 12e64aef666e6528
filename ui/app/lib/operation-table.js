// The operations of one object.
import { html } from "./view.js";
import { get } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { Empty, Failure, Loading, Panel, State, Time } from "./parts.js";
import { operationTitle } from "./operations.js";
import { duration } from "./format.js";

export function OperationTable({ path, objects }) {
  const { value, error, reload } = useLive(() => get(path), objects, [path]);
  if (!value)
    return error
      ? html`
          <${Failure} error=${error} retry=${reload} />
        `
      : html`
          <${Loading} />
        `;
  return html`
    <${Panel} title="Operations">
      ${
        value.length === 0
          ? html`
              <${Empty}>No operations.<//>
            `
          : html`
              <div class="scroll">
                <table>
                  <thead>
                    <tr>
                      <th>Operation</th>
                      <th>State</th>
                      <th>Started</th>
                      <th>Took</th>
                      <th class="wide">Attempts</th>
                      <th class="wide">Steps</th>
                    </tr>
                  </thead>
                  <tbody>
                    ${value.map(
                      (operation) => html`
                        <tr key=${operation.uuid}>
                          <td>
                            <a href=${link("operations", operation.operation_type, operation.uuid)}>
                              ${operationTitle(operation)}
                            </a>
                          </td>
                          <td><${State} value=${operation.state} /></td>
                          <td><${Time} value=${operation.created} /></td>
                          <td>${duration(Math.max(0, operation.updated - operation.created))}</td>
                          <td class="wide">${operation.attempts}</td>
                          <td class="wide muted">${operation.tasks.join(", ")}</td>
                        </tr>
                      `,
                    )}
                  </tbody>
                </table>
              </div>
            `
      }
    <//>
  `;
}
