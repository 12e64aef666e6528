// Commands in the guest, through its agent.
import { html, useState } from "./view.js";
import { get, getText, post } from "./api.js";
import { useLive } from "./live.js";
import { Action, Empty, Failure, Field, Panel, State } from "./parts.js";

const PENDING = ["preflight", "queued", "executing"];

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

function Run({ operation: first }) {
  const { value, error } = useLive(
    () => get(`/agentoperations/${first.uuid}`),
    [`agentoperation/${first.uuid}`, `instance/${first.instance_uuid}`],
    [first.uuid],
  );
  const operation = value ?? first;
  const result = operation.results?.["0"] ?? Object.values(operation.results ?? {})[0];
  const command = operation.commands[0];
  return html`
    <li class="run">
      <div class="line-one">
        <code>${command?.commandline ?? `${command?.command ?? "file"} ${command?.path ?? ""}`}</code>
        ${
          PENDING.includes(operation.state)
            ? html`
                <${State} value=${operation.state} />
              `
            : result && result["return-code"] != null
              ? html`
                  <${State}
                    value=${`exit code ${result["return-code"]}`}
                    tone=${result["return-code"] === 0 ? "good" : "bad"}
                  />
                `
              : html`
                  <${State} value=${operation.state} />
                `
        }
      </div>
      <${Failure} error=${error} />
      ${
        operation.error_message
          ? html`
              <p class="bad-text">${operation.error_message}</p>
            `
          : null
      }
      ${
        result
          ? html`
              <${Output} result=${result} />
            `
          : null
      }
    </li>
  `;
}

export function Agent({ instance, path }) {
  const [line, setLine] = useState("");
  const [runs, setRuns] = useState([]);
  const [error, setError] = useState(null);
  const earlier = useLive(() => get(`${path}/agentoperations?all=true`), [], [path]);
  const run = async (event) => {
    event.preventDefault();
    if (!line.trim()) return;
    setError(null);
    try {
      const operation = await post(`${path}/agent/execute`, { command_line: line });
      setRuns((old) => [operation, ...old]);
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
        <${Failure} error=${earlier.error} />
        ${
          shown.length
            ? html`
                <ul class="runs">
                  ${shown.map(
                    (operation) => html`
                      <${Run} key=${operation.uuid} operation=${operation} />
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
