// The webhooks of a namespace.
import { html, useState } from "./view.js";
import { del, get, post, put, seg } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { Check, ConfirmDelete, Field, IconButton, State, Time } from "./parts.js";
import { Choices, FormDialog, SecretDialog, useForm } from "./forms.js";
import { EVENT_TYPES } from "./events.js";
import { TablePanel } from "./table.js";

const DEFAULT_EVENT_TYPES = ["audit", "mutate", "status"];
const OBJECT_TYPES = [
  "instance",
  "network",
  "interface",
  "artifact",
  "blob",
  "upload",
  "clusteroperation",
  "agentoperation",
  "mapping_rule",
];
/** Types of objects that belong to the cluster: only webhooks of `system` send their events. */
const CLUSTER_TYPES = ["node", "namespace", "namespace_key", "namespace_claim", "trusted_issuer"];

/** The last result of a webhook as a state. */
export function WebhookState({ webhook }) {
  const failed = (webhook.last_failed ?? 0) > (webhook.last_delivered ?? 0);
  const [value, tone] = !webhook.enabled
    ? ["disabled", "idle"]
    : failed
      ? ["failing", "bad"]
      : webhook.last_delivered
        ? ["delivering", "good"]
        : ["nothing sent", "idle"];
  return html`
    <${State} value=${value} tone=${tone} />
  `;
}

/** Creates a webhook, or replaces the terms of `webhook`. `done` gets the record, which has the secret of a new one. */
export function WebhookForm({ path, namespace, webhook, close, done }) {
  const form = useForm({
    name: webhook?.name ?? "",
    url: webhook?.url ?? "",
    event_types: webhook?.event_types ?? DEFAULT_EVENT_TYPES,
    object_types: webhook?.object_types ?? [],
    message_prefix: webhook?.message_prefix ?? "",
    enabled: webhook?.enabled ?? true,
  });
  const save = async ({ name, ...values }) => {
    const terms = {
      ...values,
      object_types: values.object_types.length ? values.object_types : undefined,
      message_prefix: values.message_prefix || undefined,
    };
    const saved = webhook
      ? await put(`${path}/webhooks/${seg(name)}`, terms)
      : await post(`${path}/webhooks`, { name, ...terms });
    close();
    done(saved);
  };
  return html`
    <${FormDialog}
      title=${webhook ? `Change webhook ${webhook.name}` : "Create webhook"}
      form=${form}
      verb=${webhook ? "Save" : "Create"}
      ready=${form.values.name && form.values.url}
      run=${save}
      close=${close}
      wide
    >
      <div class="columns">
        <${Field} label="Name" ...${form.field("name")}>
          <input ...${form.input("name")} disabled=${Boolean(webhook)} autofocus=${!webhook} />
        <//>
        <${Field} label="URL" ...${form.field("url")} hint="With a public address, unless the operator allows others">
          <input ...${form.input("url")} type="url" placeholder="https://hooks.example/muster" />
        <//>
      </div>
      <${Choices} label="Types of events" name="event_types" form=${form} options=${EVENT_TYPES} />
      <${Choices}
        label="Types of objects"
        name="object_types"
        form=${form}
        options=${namespace === "system" ? [...OBJECT_TYPES, ...CLUSTER_TYPES] : OBJECT_TYPES}
        hint="None: all types of a namespace that you may read"
      />
      <${Field}
        label="Start of the message"
        ...${form.field("message_prefix")}
        hint="Only events whose message starts with this text"
      >
        <input ...${form.input("message_prefix")} placeholder="state is now" />
      <//>
      <${Check} label="Send events" ...${form.check("enabled")} />
    <//>
  `;
}

/** Asks before a webhook is deleted. */
export const DeleteWebhook = ({ path, webhook, close, done }) => html`
  <${ConfirmDelete}
    title=${`Delete webhook ${webhook.name}?`}
    items=${[`the webhook ${webhook.name} to ${webhook.url}`, "its log of deliveries", `${webhook.pending} pending deliveries`]}
    run=${async () => {
      await del(`${path}/webhooks/${seg(webhook.name)}`);
      done();
    }}
    close=${close}
  />
`;

export function Webhooks({ path, namespace }) {
  const live = useLive(() => get(`${path}/webhooks`), [`namespace/${namespace}`], [path]);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const created = (webhook) => {
    live.reload();
    setDialog(html`
      <${SecretDialog} title=${`Secret of webhook ${webhook.name}`} value=${webhook.secret} close=${close} />
    `);
  };
  const create = () =>
    setDialog(html`
      <${WebhookForm} path=${path} namespace=${namespace} close=${close} done=${created} />
    `);
  const remove = (webhook) =>
    setDialog(html`
      <${DeleteWebhook} path=${path} webhook=${webhook} close=${close} done=${live.reload} />
    `);
  const row = (webhook) => html`
    <tr key=${webhook.name}>
      <td><a class="row-name" href=${link("namespaces", namespace, "webhooks", webhook.name)}>${webhook.name}</a></td>
      <td><${WebhookState} webhook=${webhook} /></td>
      <td class="wide"><code>${webhook.url}</code></td>
      <td class="wide end">${webhook.pending}</td>
      <td class="wide">
        ${
          webhook.last_delivered
            ? html`
                <${Time} value=${webhook.last_delivered} />
              `
            : "–"
        }
      </td>
      <td class="end">
        <${IconButton} label=${`Delete webhook ${webhook.name}`} icon="close" run=${() => remove(webhook)} />
      </td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title="Webhooks"
      actions=${html`
        <button type="button" onClick=${create}>Create webhook</button>
      `}
      live=${live}
      columns=${["Name", "State", ["URL", "wide"], ["Pending", "wide end"], ["Last delivery", "wide"], ""]}
      row=${row}
      empty="No webhooks. A webhook sends the events of this namespace to another server, signed and retried."
    />
    ${dialog}
  `;
}
