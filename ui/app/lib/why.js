// Why an instance is in its state: what it is, since when, what it waits for, what to do next.
import { html } from "./view.js";
import { get } from "./api.js";
import { useLive } from "./live.js";
import { Failure, Panel, instanceState, toneOf } from "./parts.js";
import { age, time } from "./format.js";
import { isRunning, operationPath, operationTitle } from "./operations.js";

const HIDDEN_TYPES = ["usage", "resources", "prune"];
const MAX_SHOWN = 7;

function sentence(instance, operation) {
  const state = instanceState(instance);
  const since = instance.power_state_since ? ` for ${age(instance.power_state_since)}` : "";
  if (instance.state === "created") {
    return (
      {
        on: `It runs on ${instance.node}${since}.`,
        off: `It is powered off${since}.`,
        paused: `It is paused${since}; resume it to continue.`,
        crashed: `Its VM crashed${since}. Power it on to start it again.`,
        unknown: `Its node ${instance.node} does not check in, so the VM may run or not.`,
      }[state] ?? `Its power state is ${state}.`
    );
  }
  if (toneOf(instance.state) === "bad")
    return `It failed: ${instance.error_message ?? "the reason is in the events"}. Delete it and create it again once the reason is fixed.`;
  if (operation && isRunning(operation))
    return `It is ${instance.state}: ${operationTitle(operation)} is ${operation.state}, attempt ${operation.attempts || 1}.`;
  return `Its state is ${instance.state}.`;
}

export function Why({ instance, path }) {
  const handle = instance.last_cluster_operation;
  const objects = [`instance/${instance.uuid}`];
  const { value: operation } = useLive(async () => (handle ? get(operationPath(handle)) : null), objects, [
    handle?.op_uuid,
  ]);
  const { value: events, error } = useLive(() => get(`${path}/events?limit=60`), objects, [path]);
  const shown = (events ?? [])
    .filter((event) => !HIDDEN_TYPES.includes(event.event_type) && !event.message.startsWith("api re"))
    .slice(0, MAX_SHOWN);
  const reason = (event) => event.extra?.reason ?? event.extra?.error ?? event.extra?.error_message;
  return html`
    <${Panel} title="Why">
      <div class="body stack">
        <p>${sentence(instance, operation)}</p>
        ${
          operation?.error_report && toneOf(operation.state) === "bad"
            ? html`
                <p class="bad-text">${operation.error_report.message}</p>
              `
            : null
        }
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
      </div>
    <//>
  `;
}
