// One namespace: keys, trusts, quotas, rules, claims, webhooks, metadata, events.
import { html, useState } from "../lib/view.js";
import { del, get, post, put, seg } from "../lib/api.js";
import { namespaces, useLive } from "../lib/live.js";
import { go, link, useQueryState } from "../lib/router.js";
import {
  Action,
  ConfirmDelete,
  Empty,
  Failure,
  Field,
  Heading,
  IconButton,
  Panel,
  State,
  Tabs,
  Unloaded,
} from "../lib/parts.js";
import { FormDialog, SecretDialog, useForm } from "../lib/forms.js";
import { ShortTable } from "../lib/table.js";
import { Claims } from "../lib/claims.js";
import { Metadata } from "../lib/metadata.js";
import { Rules } from "../lib/rules.js";
import { Timeline } from "../lib/events.js";
import { Webhooks } from "../lib/webhooks.js";
import { QuotaTable, quotaTitle } from "../lib/quotas.js";
import { fullTime } from "../lib/format.js";

const DAY = 86400;
/** Sections of the page; the last member is true for those that only `system` may read. */
const TABS = [
  ["summary", "Summary"],
  ["rules", "Rules"],
  ["claims", "Claims", true],
  ["webhooks", "Webhooks"],
  ["events", "Events", true],
];

function AddKey({ path, close, done }) {
  const form = useForm({ key_name: "", expiry: "90" });
  const add = async ({ key_name, expiry }) => {
    const end = expiry ? Math.round(Date.now() / 1000 + Number(expiry) * DAY) : undefined;
    const added = await post(`${path}/keys`, { key_name, expiry: end });
    done(key_name, added.key ?? String(added));
  };
  return html`
    <${FormDialog} title="Add key" form=${form} verb="Add" ready=${form.values.key_name} run=${add} close=${close}>
      <${Field} label="Name" ...${form.field("key_name")}><input ...${form.input("key_name")} autofocus /><//>
      <${Field} label="Expires after" ...${form.field("expiry")}>
        <select ...${form.input("expiry")}>
          <option value="1">1 day</option>
          <option value="30">30 days</option>
          <option value="90">90 days</option>
          <option value="365">1 year</option>
          <option value="">Never</option>
        </select>
      <//>
    <//>
  `;
}

function SetQuota({ path, quota, close, done }) {
  const form = useForm({ limit: quota.limit ?? "" });
  const finish = () => {
    close();
    done();
  };
  const save = async ({ limit }) => {
    await put(`${path}/quotas/${quota.name}`, { limit: limit === "" ? null : Number(limit) });
    finish();
  };
  const reset = async () => {
    await del(`${path}/quotas/${quota.name}`);
    finish();
  };
  return html`
    <${FormDialog}
      title=${`Quota of ${quotaTitle(quota.name)}`}
      form=${form}
      verb="Save"
      run=${save}
      close=${close}
      extra=${
        !quota.is_default &&
        html`
          <${Action} run=${reset} onError=${form.fail}>Use the default<//>
        `
      }
    >
      <${Field} label="Limit" ...${form.field("limit")} hint="Empty: unlimited">
        <input type="number" min="0" ...${form.input("limit")} autofocus />
      <//>
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
      <td class="end"><${IconButton} label=${`Delete key ${name}`} icon="close" run=${() => remove(name)} /></td>
    </tr>
  `;
}

function AddTrust({ path, close, done }) {
  const form = useForm({ external_namespace: "" });
  const add = async (values) => {
    await post(`${path}/trust`, values);
    close();
    done();
  };
  return html`
    <${FormDialog}
      title="Trust a namespace"
      form=${form}
      verb="Trust"
      ready=${form.values.external_namespace}
      run=${add}
      close=${close}
    >
      <${Field}
        label="Namespace"
        ...${form.field("external_namespace")}
        hint="Its keys get full access to this namespace"
      >
        <input ...${form.input("external_namespace")} autofocus />
      <//>
    <//>
  `;
}

function Summary({ path, namespace, admin, reload }) {
  const { name } = namespace;
  const quotas = useLive(() => get(`${path}/quotas`), [`namespace/${name}`], [path]);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const ask = (values) =>
    setDialog(html`
      <${ConfirmDelete} ...${values} close=${close} />
    `);
  const added = (key, secret) => {
    reload();
    setDialog(html`
      <${SecretDialog} title=${`Secret of key ${key}`} value=${secret} close=${close} />
    `);
  };
  const addKey = () =>
    setDialog(html`
      <${AddKey} path=${path} close=${close} done=${added} />
    `);
  const addTrust = () =>
    setDialog(html`
      <${AddTrust} path=${path} close=${close} done=${reload} />
    `);
  const setQuota = (quota) =>
    setDialog(html`
      <${SetQuota} path=${path} quota=${quota} close=${close} done=${quotas.reload} />
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
  const trust = (other) => html`
    <li key=${other}>
      <span class="line-one">
        <a href=${link("namespaces", other)}>${other}</a>
        ${
          other !== "system" &&
          html`
            <${IconButton} label=${`Stop trusting ${other}`} icon="close" run=${() => removeTrust(other)} />
          `
        }
      </span>
    </li>
  `;
  const editQuota = (quota) => html`
    <${IconButton} label=${`Change quota of ${quotaTitle(quota.name)}`} icon="edit" run=${() => setQuota(quota)} />
  `;
  return html`
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel}
          title="Keys"
          actions=${html`
            <button type="button" onClick=${addKey}>Add key</button>
          `}
        >
          <${ShortTable}
            columns=${["Name", "Expires", ["Scopes", "wide"], ""]}
            records=${namespace.keys}
            row=${(key) => html`
              <${Key} key=${key} path=${path} name=${key} remove=${removeKey} />
            `}
            empty="No keys."
          />
        <//>
        <${Panel} title="Quotas">
          <${Failure} error=${quotas.error} />
          ${
            quotas.value &&
            html`
              <${QuotaTable} quotas=${quotas.value} actions=${admin ? editQuota : null} />
            `
          }
        <//>
      </div>
      <div class="stack third">
        <${Panel}
          title="Trusts"
          actions=${html`
            <button type="button" onClick=${addTrust}>Add</button>
          `}
        >
          ${
            namespace.trust.full.length === 0
              ? html`
                  <${Empty}>Trusts no other namespace.<//>
                `
              : html`
                  <ul class="problems">
                    ${namespace.trust.full.map(trust)}
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

export default function Namespace({ route, admin }) {
  const name = route.parts[1];
  const path = `/auth/namespaces/${seg(name)}`;
  const up = ["Namespaces", "#/namespaces"];
  const [tab, select] = useQueryState(route, "tab", "summary");
  const { value: namespace, error, reload } = useLive(() => get(path), [`namespace/${name}`], [path]);
  const [deleting, setDeleting] = useState(false);
  if (!namespace)
    return html`
      <${Unloaded} title="Namespace" up=${up} error=${error} retry=${reload} />
    `;
  const remove = async () => {
    await del(path);
    namespaces.load();
    go("/namespaces");
  };
  return html`
    <${Heading}
      title=${name}
      up=${up}
      status=${html`
        <${State} value=${namespace.state} />
      `}
    >
      <a class="button" href=${`#/instances?filter=${encodeURIComponent(`namespace:${name}`)}`}>Instances</a>
      ${
        admin &&
        name !== "system" &&
        html`
          <button type="button" class="danger" onClick=${() => setDeleting(true)}>Delete</button>
        `
      }
    <//>
    <${Failure} error=${error} retry=${reload} />
    <${Tabs} tabs=${TABS.filter((entry) => admin || !entry[2])} current=${tab} select=${select} />
    ${
      tab === "summary" &&
      html`
        <${Summary} path=${path} namespace=${namespace} admin=${admin} reload=${reload} />
      `
    }
    ${
      tab === "rules" &&
      html`
        <${Rules} path=${path} namespace=${name} />
      `
    }
    ${
      tab === "claims" &&
      html`
        <${Claims} path=${path} namespace=${name} />
      `
    }
    ${
      tab === "webhooks" &&
      html`
        <${Webhooks} path=${path} namespace=${name} />
      `
    }
    ${
      tab === "events" &&
      html`
        <${Timeline} path=${`${path}/events`} type="namespace" uuid=${name} />
      `
    }
    ${
      deleting &&
      html`
        <${ConfirmDelete}
          title=${`Delete ${name}?`}
          items=${[`the namespace ${name} with its keys, rules, claims and webhooks`]}
          kept="The API refuses this while the namespace has instances or networks."
          word=${name}
          run=${remove}
          close=${() => setDeleting(false)}
        />
      `
    }
  `;
}
