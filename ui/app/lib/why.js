// Why an object is in its state, as the server explains it: since when, what it waits for, what to do next.
import { html } from "./view.js";
import { get } from "./api.js";
import { isRoutine, useLive } from "./live.js";
import { Failure, Loading, Panel } from "./parts.js";
import { ObjectLink } from "./events.js";
import { time } from "./format.js";

const MAX_EVENTS = 7;

function Nodes({ placement }) {
  const verdict = (node) => (node.chosen ? "chosen" : node.stage ? (node.reason ?? node.stage) : "candidate");
  return html`
    <details>
      <summary>Placement: ${placement.length} nodes</summary>
      <table>
        <thead>
          <tr>
            <th>Node</th>
            <th>Result</th>
          </tr>
        </thead>
        <tbody>
          ${placement.map(
            (node) => html`
              <tr key=${node.node}>
                <td>${node.node}</td>
                <td>${verdict(node)}</td>
              </tr>
            `,
          )}
        </tbody>
      </table>
    </details>
  `;
}

function History({ path, objects }) {
  const { value: events, error } = useLive(() => get(`${path}/events?limit=60`), objects, [path]);
  const shown = (events ?? []).filter((event) => !isRoutine(event)).slice(0, MAX_EVENTS);
  const reason = (event) => event.extra?.reason ?? event.extra?.error ?? event.extra?.error_message;
  return html`
    <${Failure} error=${error} />
    <ol class="history" reversed>
      ${shown.map(
        (event) => html`
          <li key=${event.event_uuid}>
            <span class="when">${time(event.timestamp)}</span>
            <span>
              ${event.message}${
                reason(event)
                  ? html`
                      <span class="muted aside">(${String(reason(event))})</span>
                    `
                  : null
              }
            </span>
          </li>
        `,
      )}
    </ol>
  `;
}

// `object` is the type and id by which events name it; `history` tells whether it has a list of events.
export function Why({ path, object, history = false }) {
  const objects = [object];
  const { value: explained, error } = useLive(() => get(`${path}/explain`), objects, [path]);
  const since = explained?.since ? ` (${explained.state} since ${time(explained.since)})` : "";
  return html`
    <${Panel} title="Why">
      <div class="body stack">
        <${Failure} error=${error} />
        ${
          explained
            ? html`
                <p>${explained.why}${since}</p>
                ${explained.waits_for.map(
                  (awaited) => html`
                    <p key=${awaited.uuid}>
                      Waits for ${awaited.text} (<${ObjectLink} type=${awaited.object_type} uuid=${awaited.uuid} />,${" "}
                      ${awaited.state})
                    </p>
                  `,
                )}
                ${explained.next.map(
                  (step) => html`
                    <p key=${step.text}>
                      Next: ${step.text}
                      ${
                        step.command
                          ? html`
                              <code class="aside">${step.command}</code>
                            `
                          : null
                      }
                    </p>
                  `,
                )}
                ${
                  explained.placement.length > 0
                    ? html`
                        <${Nodes} placement=${explained.placement} />
                      `
                    : null
                }
              `
            : error
              ? null
              : html`
                  <${Loading} />
                `
        }
        ${
          history
            ? html`
                <${History} path=${path} objects=${objects} />
              `
            : null
        }
      </div>
    <//>
  `;
}
