// Operations that run or failed, found through the objects that they change.
import { html } from "../lib/view.js";
import { link } from "../lib/router.js";
import { Empty, Heading, Panel, State, Time } from "../lib/parts.js";
import { ObjectLink } from "../lib/events.js";
import { isRunning, operationTitle, useOperations } from "../lib/operations.js";
import { duration } from "../lib/format.js";

const MAX_SHOWN = 100;

function List({ title, entries, empty }) {
  return html`
    <${Panel} title=${title}>
      ${
        entries.length === 0
          ? html`
              <${Empty}>${empty}<//>
            `
          : html`
              <div class="scroll">
                <table>
                  <thead>
                    <tr>
                      <th>Operation</th>
                      <th>Object</th>
                      <th>State</th>
                      <th>Started</th>
                      <th class="wide">Took</th>
                      <th class="wide">Reason</th>
                    </tr>
                  </thead>
                  <tbody>
                    ${entries.map(
                      ({ operation, target }) => html`
                        <tr key=${operation.uuid}>
                          <td>
                            <a href=${link("operations", operation.operation_type, operation.uuid)}>
                              ${operationTitle(operation)}
                            </a>
                          </td>
                          <td><${ObjectLink} ...${target} /></td>
                          <td><${State} value=${operation.state} /></td>
                          <td><${Time} value=${operation.created} /></td>
                          <td class="wide">${duration(Math.max(0, operation.updated - operation.created))}</td>
                          <td class="wide">${operation.error_report?.message ?? ""}</td>
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

export default function Operations() {
  const busy = useOperations(["busy"], MAX_SHOWN).filter(({ operation }) => isRunning(operation));
  const failed = useOperations(["bad"], MAX_SHOWN);
  return html`
    <${Heading} title="Operations" />
    <${List} title="Running" entries=${busy} empty="No operation is running." />
    <${List}
      title="Last operation of objects in an error state"
      entries=${failed}
      empty="No object is in an error state."
    />
    <p class="hint">Every instance, network and artifact lists all of its operations on its own page.</p>
  `;
}
