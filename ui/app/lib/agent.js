// Commands and files in the guest, through its agent.
import { html, useEffect, useRef, useState } from "./view.js";
import { del, get, getText, post, seg, url } from "./api.js";
import { useLive } from "./live.js";
import { GuestFiles } from "./guest-files.js";
import { Action, Empty, Failure, Field, Panel, State } from "./parts.js";
import { runCommand } from "./sockets.js";

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

/** The number of characters of live output that are kept. */
const MAX_OUTPUT = 200000;
/** An unfinished line that is longer than this is shown as it is. */
const MAX_LINE = 10000;

/** Returns the text that a terminal without a cursor shows. */
export const plainText = (output) =>
  output
    .replaceAll("\r\n", "\n")
    .replaceAll(/\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007]*\u0007|[ -/]*[0-~])/g, "")
    .replaceAll(/[^\n]*\r/g, "")
    .replaceAll(/[\u0000-\u0008\u000b-\u001f\u007f]/g, "");

/** Appends output to an element. Only the last line is rendered again, so long output costs no more than short output. */
export class OutputWriter {
  constructor(element) {
    this.element = element;
    this.length = 0;
    this.line = "";
    this.last = element.appendChild(document.createTextNode(""));
  }

  write(text) {
    this.line += text;
    const end = this.line.lastIndexOf("\n") + 1 || (this.line.length > MAX_LINE ? this.line.length : 0);
    if (end > 0) {
      const complete = document.createTextNode(plainText(this.line.slice(0, end)));
      this.element.insertBefore(complete, this.last);
      this.length += complete.length;
      this.line = this.line.slice(end);
    }
    this.last.data = plainText(this.line);
    while (this.length > MAX_OUTPUT && this.element.firstChild !== this.last) {
      this.length -= this.element.firstChild.length;
      this.element.firstChild.remove();
    }
  }
}

/** A command whose output is shown while it runs. It ends with the page. */
function LiveRun({ path, line, refused }) {
  const output = useRef(null);
  const [hasOutput, setHasOutput] = useState(false);
  const [result, setResult] = useState(null);
  const command = useRef(null);
  const [isInterrupted, setInterrupted] = useState(false);
  useEffect(() => {
    let isShown = true;
    const writer = new OutputWriter(output.current);
    command.current = runCommand(path, line, {
      output: (text) => {
        if (!isShown) return;
        writer.write(text);
        setHasOutput(true);
      },
      ended: (end) => {
        if (!isShown) return;
        if (end.refused) refused();
        else setResult(end);
      },
    });
    return () => {
      isShown = false;
      command.current.end();
    };
  }, []);
  const stop = () => {
    if (isInterrupted) command.current.end();
    else command.current.interrupt();
    setInterrupted(true);
  };
  const state = result?.code == null ? (result ? "unknown" : "executing") : `exit code ${result.code}`;
  return html`
    <li class="run">
      <div class="line-one">
        <code>${line}</code>
        <span class="actions">
          <${State} value=${state} tone=${result ? (result.code === 0 ? "good" : "bad") : "busy"} />
          ${
            result
              ? null
              : html`
                  <${Action} run=${stop}>${isInterrupted ? "End" : "Stop"}<//>
                `
          }
        </span>
      </div>
      <${Failure} error=${result?.error} />
      ${
        result?.reason
          ? html`
              <p class="bad-text">${result.reason}</p>
            `
          : null
      }
      <pre class="output" aria-label="output" aria-live="polite" ref=${output} hidden=${!hasOutput}></pre>
    </li>
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
  const [live, setLive] = useState([]);
  const queue = async (commandLine) => {
    setError(null);
    try {
      started(await post(`${path}/agent/execute`, { command_line: commandLine }));
      setLine("");
    } catch (failure) {
      setError(failure);
    }
  };
  // An agent that is not ready, or that has no terminals, runs the command from its queue.
  const run = (event) => {
    event.preventDefault();
    const isBackground = event.submitter?.name === "background";
    if (!line.trim()) return;
    if (isBackground || instance.agent_state !== "ready") {
      queue(line);
      return;
    }
    setLive((old) => [{ id: (old[0]?.id ?? 0) + 1, line }, ...old]);
    setLine("");
  };
  const refuse = (entry) => {
    setLive((old) => old.filter((other) => other.id !== entry.id));
    queue(entry.line);
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
          <button name="background" title="Continues when the page is closed; the output is shown at the end">
            Run in background
          </button>
        </form>
        ${
          live.length
            ? html`
                <ul class="runs">
                  ${live.map(
                    (entry) => html`
                      <${LiveRun} key=${entry.id} path=${path} line=${entry.line} refused=${() => refuse(entry)} />
                    `,
                  )}
                </ul>
              `
            : null
        }
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
