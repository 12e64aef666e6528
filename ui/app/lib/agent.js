// Commands and files in the guest, through its agent.
import { html, useState } from "./view.js";
import { del, get, getText, post, seg, url } from "./api.js";
import { useLive } from "./live.js";
import { GuestFiles } from "./guest-files.js";
import { Action, Empty, Failure, Field, Panel, State } from "./parts.js";

const isPending = (operation) => ["preflight", "queued", "executing"].includes(operation.state);

function Output({ result }) {
  const [more, setMore] = useState({});
  const part = (name) => {
    const text = more[name] ?? result[name];
    const blob = result[`${name}_blob`] ?? result[`${name}-blob`];
    return html`
      ${
        text
          ? html`
              <pre class="output" aria-label=${name}>${text}</pre>
            `
          : null
      }
      ${
        blob && !more[name]
          ? html`
              <${Action}
                run=${async () => {
                  const text = await getText(`/blobs/${blob}/data?limit=1000000`);
                  setMore((old) => ({ ...old, [name]: text }));
                }}
              >
                Show ${name}
              <//>
            `
          : null
      }
    `;
  };
  return html`
    ${part("stdout")}${part("stderr")}
  `;
}

/** Returns what an agent operation does, as text. */
function describe({ command, commandline, path }) {
  if (command === "execute") return commandline;
  return (
    { "put-blob": `copy to ${path}`, "get-file": `read ${path}`, chmod: `change mode of ${path}` }[command] ?? command
  );
}

/** The link that stores a file of the guest on the computer of the user. */
function Download({ result }) {
  const name = result.path?.split("/").at(-1) || "file";
  return html`
    <p><a href=${url(`/blobs/${seg(result.content_blob)}/data`)} download=${name}>Download ${name}</a></p>
  `;
}

function Run({ operation: first, changed }) {
  const { value, error } = useLive(
    () => get(`/agentoperations/${first.uuid}`),
    [`agentoperation/${first.uuid}`, `instance/${first.instance_uuid}`],
    [first.uuid],
  );
  const operation = value ?? first;
  const results = Object.values(operation.results ?? {});
  const result = results[0];
  const code = result?.["return-code"];
  const cancel = async () => {
    await del(`/agentoperations/${seg(first.uuid)}`);
    changed();
  };
  return html`
    <li class="run">
      <div class="line-one">
        <code>${operation.commands[0] && describe(operation.commands[0])}</code>
        <span class="actions">
          ${
            code == null || isPending(operation)
              ? html`
                  <${State} value=${operation.state} />
                `
              : html`
                  <${State} value=${`exit code ${code}`} tone=${code === 0 ? "good" : "bad"} />
                `
          }
          ${
            isPending(operation) &&
            html`
              <${Action} run=${cancel}>Cancel<//>
            `
          }
        </span>
      </div>
      <${Failure} error=${error} />
      ${
        operation.error_message &&
        html`
          <p class="bad-text">${operation.error_message}</p>
        `
      }
      ${
        result &&
        html`
          <${Output} result=${result} />
        `
      }
      ${results
        .filter((one) => one.content_blob)
        .map(
          (one) => html`
            <${Download} result=${one} />
          `,
        )}
    </li>
  `;
}

export function Agent({ instance, path }) {
  const [line, setLine] = useState("");
  const [runs, setRuns] = useState([]);
  const [error, setError] = useState(null);
  const earlier = useLive(() => get(`${path}/agentoperations?all=true`), [], [path]);
  const started = (operation) => setRuns((old) => [operation, ...old]);
  const changed = () => {
    setRuns([]);
    earlier.reload();
  };
  const run = async (event) => {
    event.preventDefault();
    if (!line.trim()) return;
    setError(null);
    try {
      started(await post(`${path}/agent/execute`, { command_line: line }));
      setLine("");
    } catch (failure) {
      setError(failure);
    }
  };
  const shown = [
    ...runs,
    ...(earlier.value ?? []).filter((operation) => !runs.some((own) => own.uuid === operation.uuid)).reverse(),
  ].slice(0, 20);
  return html`
    <${Panel} title="Run a command in the guest">
      <div class="body stack">
        <form class="command" onSubmit=${run}>
          <${Field} label="Command line" name="command_line" error=${error}>
            <input
              class="mono"
              value=${line}
              placeholder="uname -a"
              autocomplete="off"
              spellcheck="false"
              onInput=${(event) => setLine(event.target.value)}
            />
          <//>
          <button class="primary">Run</button>
        </form>
        ${
          instance.agent_state !== "ready"
            ? html`
                <p class="hint">The agent is ${instance.agent_state ?? "unknown"}. Commands wait until it is ready.</p>
              `
            : null
        }
        ${
          error && error.field !== "command_line"
            ? html`
                <${Failure} error=${error} />
              `
            : null
        }
      </div>
    <//>
    <${GuestFiles} path=${path} started=${started} />
    <${Panel} title="Commands and copies">
      <div class="body stack">
        <${Failure} error=${earlier.error} />
        ${
          shown.length
            ? html`
                <ul class="runs">
                  ${shown.map(
                    (operation) => html`
                      <${Run} key=${operation.uuid} operation=${operation} changed=${changed} />
                    `,
                  )}
                </ul>
              `
            : html`
                <${Empty}>No commands were run yet.<//>
              `
        }
      </div>
    <//>
  `;
}
