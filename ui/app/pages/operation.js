// One operation: its steps and the operations that it depends on.
import { html } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { link } from "../lib/router.js";
import { CopyId, Empty, Facts, Heading, Panel, Progress, State, Time, Unloaded } from "../lib/parts.js";
import { ObjectLink } from "../lib/events.js";
import { isRunning, operationTitle } from "../lib/operations.js";
import { bytes, duration } from "../lib/format.js";
import { Why } from "../lib/why.js";

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
  const kind =
    operation.state === "complete"
      ? "done"
      : operation.state === "executing"
        ? "now"
        : ["error", "abort"].includes(operation.state)
          ? "failed"
          : "";
  const waits = (chain ?? []).filter((entry) => entry.uuid !== id);
  return html`
    <${Heading}
      title=${operationTitle(operation)}
      up=${["Operations", "#/operations"]}
      status=${html`
        <${State} value=${operation.state} />
      `}
    />
    ${
      operation.error_report
        ? html`
            <div class="failure" role="alert">
              <p>${operation.error_report.message}</p>
              <p class="request-id">Code ${operation.error_report.code}</p>
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
              ${operation.tasks.map(
                (task) => html`
                  <li key=${task} class=${kind}>
                    <span class="mark" aria-hidden="true"></span>
                    ${task.replaceAll("_", " ")}
                  </li>
                `,
              )}
            </ol>
            ${
              operation.progress
                ? html`
                    <${Progress} label="Progress" done=${operation.progress.done} total=${operation.progress.total} />
                    <span class="muted">
                      ${bytes(operation.progress.done)}${operation.progress.total ? ` of ${bytes(operation.progress.total)}` : ""}
                    </span>
                  `
                : null
            }
          </div>
        <//>
      </div>
    </div>
  `;
}
