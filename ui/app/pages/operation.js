// One operation: its steps and the operations that it depends on.
import { html } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { link } from "../lib/router.js";
import { CopyId, Empty, Facts, Heading, Panel, State, Time, Unloaded } from "../lib/parts.js";
import { ObjectLink } from "../lib/events.js";
import { CancelOperation, OperationProgress, isRunning, operationTitle } from "../lib/operations.js";
import { duration } from "../lib/format.js";
import { Why } from "../lib/why.js";

/** The details of a failure, such as its step, as text. */
const details = (report) =>
  Object.entries(report.details)
    .map(
      ([name, value]) => `, ${name.replaceAll("_", " ")} ${typeof value === "string" ? value : JSON.stringify(value)}`,
    )
    .join("");

export default function Operation({ route }) {
  const [, type, id] = route.parts;
  const path = `/clusteroperations/${seg(type)}/${seg(id)}`;
  // The target is known only after the first read.
  const { value: operation, error, reload } = useLive(() => get(path), [`clusteroperation/${id}`], [path]);
  const target = operation ? `${operation.target_object_type}/${operation.target_uuid}` : "";
  const { value: chain } = useLive(
    () =>
      target
        ? get(`/clusteroperations/${seg(id)}/chain`).then(
            (list) => {
              reload();
              return list;
            },
            () => [],
          )
        : [],
    [target],
    [target],
  );
  if (!operation)
    return html`
      <${Unloaded} title="Operation" up=${["Operations", "#/operations"]} error=${error} retry=${reload} />
    `;
  const done = operation.state === "complete" ? operation.tasks.length : operation.tasks_completed;
  const current = { executing: ["now", "in progress"], error: ["failed", "failed"], abort: ["failed", "cancelled"] };
  const step = (task, index) => {
    const [kind, text] =
      index < done ? ["done", "done"] : (index === done && current[operation.state]) || ["", "not started"];
    return html`
      <li key=${task} class=${kind}>
        <span class="mark" aria-hidden="true"></span>
        <span>${task.replaceAll("_", " ")}</span>
        <span class="muted">${text}</span>
      </li>
    `;
  };
  const waits = (chain ?? []).filter((entry) => entry.uuid !== id);
  return html`
    <${Heading}
      title=${operationTitle(operation)}
      up=${["Operations", "#/operations"]}
      status=${html`
        <${State} value=${operation.state} />
      `}
    >
      <${CancelOperation} operation=${operation} />
    <//>
    ${
      operation.error_report
        ? html`
            <div class="failure" role="alert">
              <p>${operation.error_report.message}</p>
              <p class="request-id">Code ${operation.error_report.code}${details(operation.error_report)}</p>
            </div>
          `
        : null
    }
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel} title="Summary">
          <${Facts}
            rows=${[
              [
                "Object",
                html`
                  <${ObjectLink} type=${operation.target_object_type} uuid=${operation.target_uuid} />
                `,
              ],
              ["Namespace", operation.namespace ?? "–"],
              ["Attempts", operation.attempts],
              [
                "Started",
                html`
                  <${Time} value=${operation.created} />
                `,
              ],
              [
                isRunning(operation) ? "Last change after" : "Took",
                duration(Math.max(0, operation.updated - operation.created)),
              ],
              [
                "UUID",
                html`
                  <${CopyId} value=${operation.uuid} />
                `,
              ],
            ]}
          />
        <//>
        <${Panel} title="Depends on">
          ${
            waits.length === 0
              ? html`
                  <${Empty}>No other operation.<//>
                `
              : html`
                  <ul class="problems">
                    ${waits.map(
                      (entry) => html`
                        <li key=${entry.uuid}>
                          <span class="line-one">
                            <a href=${link("operations", entry.operation_type, entry.uuid)}>${operationTitle(entry)}</a>
                            <${State} value=${entry.state} />
                          </span>
                        </li>
                      `,
                    )}
                  </ul>
                `
          }
        <//>
      </div>
      <div class="stack third">
        <${Why} path=${path} object=${target || `clusteroperation/${id}`} />
        <${Panel} title="Steps">
          <div class="body stack">
            <ol class="steps">
              ${operation.tasks.map(step)}
            </ol>
            <${OperationProgress} operation=${operation} />
          </div>
        <//>
      </div>
    </div>
  `;
}
