// One namespace: keys, trusts, quotas, metadata, events.
import { html, useState } from "../lib/view.js";
import { del, get, post, put, seg } from "../lib/api.js";
import { namespaces, useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import {
  Action,
  ConfirmDelete,
  CopyId,
  Dialog,
  Empty,
  Failure,
  Field,
  Heading,
  Panel,
  State,
  Icon,
  Unloaded,
} from "../lib/parts.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { QuotaTable, quotaTitle } from "../lib/quotas.js";
import { fullTime } from "../lib/format.js";

const DAY = 86400;

function AddKey({ path, close, done }) {
  const [name, setName] = useState("");
  const [days, setDays] = useState("90");
  const [added, setAdded] = useState(null);
  const [error, setError] = useState(null);
  const add = async () => {
    setAdded(
      await post(`${path}/keys`, {
        key_name: name,
        expiry: days ? Math.round(Date.now() / 1000 + Number(days) * DAY) : undefined,
      }),
    );
    done();
  };
  if (added) {
    return html`
      <${Dialog} title=${`Key ${name}`} close=${close}>
        <div class="body">
          <p>Copy the secret now. It is not stored and cannot be shown again.</p>
          <${CopyId} value=${added.key ?? String(added)} />
        </div>
        <footer><button type="button" class="primary" onClick=${close}>Done</button></footer>
      <//>
    `;
  }
  return html`
    <${Dialog} title="Add key" close=${close}>
      <div class="body">
        <${Field} label="Name" name="key_name" error=${error}>
          <input
            value=${name}
            autofocus
            autocomplete="off"
            spellcheck="false"
            onInput=${(event) => setName(event.target.value)}
          />
        <//>
        <${Field} label="Expires after" name="expiry" error=${error}>
          <select value=${days} onChange=${(event) => setDays(event.target.value)}>
            <option value="1">1 day</option>
            <option value="30">30 days</option>
            <option value="90">90 days</option>
            <option value="365">1 year</option>
            <option value="">Never</option>
          </select>
        <//>
        ${
          ["key_name", "expiry"].includes(error?.field)
            ? null
            : html`
                <${Failure} error=${error} />
              `
        }
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" disabled=${!name} run=${add} onError=${setError}>Add<//>
      </footer>
    <//>
  `;
}

function SetQuota({ path, quota, close, done }) {
  const [text, setText] = useState(quota.limit ?? "");
  const [error, setError] = useState(null);
  const save = async () => {
    await put(`${path}/quotas/${quota.name}`, { limit: text === "" ? null : Number(text) });
    close();
    done();
  };
  const reset = async () => {
    await del(`${path}/quotas/${quota.name}`);
    close();
    done();
  };
  return html`
    <${Dialog} title=${`Quota of ${quotaTitle(quota.name)}`} close=${close}>
      <div class="body">
        <${Field} label="Limit" name="limit" error=${error} hint="Empty: unlimited">
          <input type="number" min="0" value=${text} autofocus onInput=${(event) => setText(event.target.value)} />
        <//>
        ${
          error?.field === "limit"
            ? null
            : html`
                <${Failure} error=${error} />
              `
        }
      </div>
      <footer>
        ${
          quota.is_default
            ? null
            : html`
                <${Action} run=${reset} onError=${setError}>Use the default<//>
              `
        }
        <${Action} class="primary" run=${save} onError=${setError}>Save<//>
      </footer>
    <//>
  `;
}

function Key({ path, name, remove }) {
  const { value } = useLive(() => get(`${path}/keys/${seg(name)}`), [], [path, name]);
  return html`
    <tr>
      <td>${name}</td>
      <td>${value ? (value.expiry ? fullTime(value.expiry) : "never") : "…"}</td>
      <td class="wide">${value?.scopes?.length ? value.scopes.join(", ") : "all"}</td>
      <td class="end">
        <button type="button" class="icon" aria-label=${`Delete key ${name}`} onClick=${() => remove(name)}>
          <${Icon} name="close" />
        </button>
      </td>
    </tr>
  `;
}

function AddTrust({ path, close, done }) {
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const add = async () => {
    await post(`${path}/trust`, { external_namespace: name });
    close();
    done();
  };
  return html`
    <${Dialog} title="Trust a namespace" close=${close}>
      <div class="body">
        <${Field}
          label="Namespace"
          name="external_namespace"
          error=${error}
          hint="Its keys get full access to this namespace"
        >
          <input value=${name} autofocus onInput=${(event) => setName(event.target.value)} />
        <//>
        <${Failure} error=${error} />
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" disabled=${!name} run=${add} onError=${setError}>Trust<//>
      </footer>
    <//>
  `;
}

export default function Namespace({ route, admin }) {
  const name = route.parts[1];
  const path = `/auth/namespaces/${seg(name)}`;
  const objects = [`namespace/${name}`];
  const { value: namespace, error, reload } = useLive(() => get(path), objects, [path]);
  const quotas = useLive(() => get(`${path}/quotas`), objects, [path]);
  const [dialog, setDialog] = useState(null);
  if (!namespace)
    return html`
      <${Unloaded} title="Namespace" up=${["Namespaces", "#/namespaces"]} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const ask = (values) =>
    setDialog(html`
      <${ConfirmDelete} ...${values} close=${close} />
    `);
  const removeKey = (key) =>
    ask({
      title: `Delete key ${key}?`,
      items: [`the key ${key} of ${name}; its tokens and sessions end at once`],
      run: async () => {
        await del(`${path}/keys/${seg(key)}`);
        reload();
      },
    });
  const removeTrust = (other) =>
    ask({
      title: `Stop trusting ${other}?`,
      verb: "Stop trusting",
      items: [`the access of ${other} to ${name}`],
      run: async () => {
        await del(`${path}/trust/${seg(other)}`);
        reload();
      },
    });
  const removeAll = () =>
    ask({
      title: `Delete ${name}?`,
      items: [`the namespace ${name} with its keys, rules and claims`],
      kept: "The API refuses this while the namespace has instances or networks.",
      word: name,
      run: async () => {
        await del(path);
        namespaces.load();
        go("/namespaces");
      },
    });
  return html`
    <${Heading}
      title=${name}
      up=${["Namespaces", "#/namespaces"]}
      status=${html`
        <${State} value=${namespace.state} />
      `}
    >
      <a class="button" href=${`#/instances?filter=${encodeURIComponent(`namespace:${name}`)}`}>Instances</a>
      ${
        admin && name !== "system"
          ? html`
              <button type="button" class="danger" onClick=${removeAll}>Delete</button>
            `
          : null
      }
    <//>
    <${Failure} error=${error} retry=${reload} />
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel}
          title="Keys"
          actions=${html`
            <button
              type="button"
              onClick=${() =>
                setDialog(html`
                  <${AddKey} path=${path} close=${close} done=${reload} />
                `)}
            >
              Add key
            </button>
          `}
        >
          ${
            namespace.keys.length === 0
              ? html`
                  <${Empty}>No keys.<//>
                `
              : html`
                  <div class="scroll">
                    <table>
                      <thead>
                        <tr>
                          <th>Name</th>
                          <th>Expires</th>
                          <th class="wide">Scopes</th>
                          <td></td>
                        </tr>
                      </thead>
                      <tbody>
                        ${namespace.keys.map(
                          (key) => html`
                            <${Key} key=${key} path=${path} name=${key} remove=${removeKey} />
                          `,
                        )}
                      </tbody>
                    </table>
                  </div>
                `
          }
        <//>
        <${Panel} title="Quotas">
          <${Failure} error=${quotas.error} />
          ${
            quotas.value
              ? html`
                  <${QuotaTable}
                    quotas=${quotas.value}
                    actions=${
                      admin
                        ? (quota) => html`
                            <button
                              type="button"
                              class="icon"
                              aria-label=${`Change quota of ${quotaTitle(quota.name)}`}
                              onClick=${() =>
                                setDialog(html`
                                  <${SetQuota} path=${path} quota=${quota} close=${close} done=${quotas.reload} />
                                `)}
                            >
                              <${Icon} name="edit" />
                            </button>
                          `
                        : null
                    }
                  />
                `
              : null
          }
        <//>
        ${
          admin
            ? html`
                <${Timeline} path=${`${path}/events`} type="namespace" uuid=${name} />
              `
            : null
        }
      </div>
      <div class="stack third">
        <${Panel}
          title="Trusts"
          actions=${html`
            <button
              type="button"
              onClick=${() =>
                setDialog(html`
                  <${AddTrust} path=${path} close=${close} done=${reload} />
                `)}
            >
              Add
            </button>
          `}
        >
          ${
            namespace.trust.full.length === 0
              ? html`
                  <${Empty}>Trusts no other namespace.<//>
                `
              : html`
                  <ul class="problems">
                    ${namespace.trust.full.map(
                      (other) => html`
                        <li key=${other}>
                          <span class="line-one">
                            <a href=${link("namespaces", other)}>${other}</a>
                            ${
                              other === "system"
                                ? null
                                : html`
                                    <button
                                      type="button"
                                      class="icon"
                                      aria-label=${`Stop trusting ${other}`}
                                      onClick=${() => removeTrust(other)}
                                    >
                                      <${Icon} name="close" />
                                    </button>
                                  `
                            }
                          </span>
                        </li>
                      `,
                    )}
                  </ul>
                `
          }
        <//>
        <${Metadata} path=${path} values=${namespace.metadata} reload=${reload} />
      </div>
    </div>
    ${dialog}
  `;
}
