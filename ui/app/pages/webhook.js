// One webhook: terms, secret, tests, and the log of its deliveries.
import { html, useEffect, useState } from "../lib/view.js";
import { get, post, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { Action, CopyId, Facts, Failure, Field, Heading, Panel, State, Time, Unloaded, toast } from "../lib/parts.js";
import { FormDialog, SecretDialog, integer, useForm } from "../lib/forms.js";
import { DeleteWebhook, WebhookForm, WebhookState } from "../lib/webhooks.js";
import { ObjectLink } from "../lib/events.js";
import { TablePanel } from "../lib/table.js";
import { fullTime, time } from "../lib/format.js";

const PAGE = 50;
/** Milliseconds after an attempt is due until its result is read. */
const ATTEMPT_PAUSE = 2000;
/** The longest timeout of browsers, in milliseconds. */
const MAX_TIMEOUT = 2 ** 31 - 1;

const TONES = { pending: "busy", delivered: "good", failed: "bad", dropped: "bad" };

function RotateSecret({ path, close, done }) {
  const form = useForm({ overlap: 24 });
  const rotate = async ({ overlap }) => {
    const hours = integer(overlap);
    done(await post(`${path}/rotate-secret`, { overlap: typeof hours === "number" ? hours * 3600 : hours }));
  };
  return html`
    <${FormDialog} title="Rotate secret" form=${form} verb="Rotate" run=${rotate} close=${close}>
      <p>The new secret is shown once. Install it at the receiver before the previous one expires.</p>
      <${Field}
        label="Sign with the previous secret, too, for (hours)"
        ...${form.field("overlap")}
        hint="At most 168; 0 if the previous secret has leaked"
      >
        <input type="number" min="0" max="168" ...${form.input("overlap")} autofocus />
      <//>
    <//>
  `;
}

/** The deliveries, newest first. They have no events: the log is read again when the next attempt was due. */
function Deliveries({ path, tests, changed }) {
  const [limit, setLimit] = useState(PAGE);
  const live = useLive(() => get(`${path}/deliveries?limit=${limit}`), [], [path, limit]);
  useEffect(() => {
    if (tests) live.reload();
  }, [tests]);
  const due = Math.min(...(live.value ?? []).map((delivery) => delivery.next_attempt ?? Infinity));
  useEffect(() => {
    if (!Number.isFinite(due)) return undefined;
    const pause = Math.min(MAX_TIMEOUT, Math.max(0, due * 1000 - Date.now()) + ATTEMPT_PAUSE);
    const timer = setTimeout(() => {
      live.reload();
      changed();
    }, pause);
    return () => clearTimeout(timer);
  }, [live.value]);
  const redeliver = async (delivery) => {
    await post(`${path}/deliveries/${seg(delivery.uuid)}/redeliver`);
    live.reload();
  };
  const row = (delivery) => html`
    <tr key=${delivery.uuid}>
      <td class="wide" title=${fullTime(delivery.created)}>${time(delivery.created)}</td>
      <td><${State} value=${delivery.state} tone=${TONES[delivery.state]} /></td>
      <td>
        ${delivery.message}
        ${
          delivery.error &&
          html`
            <span class="bad-text block">${delivery.error}</span>
          `
        }
        ${
          delivery.next_attempt &&
          html`
            <span class="muted block">Next attempt ${time(delivery.next_attempt)}</span>
          `
        }
      </td>
      <td class="wide"><${ObjectLink} type=${delivery.object_type} uuid=${delivery.object_uuid} /></td>
      <td class="wide">${delivery.response_status ?? "–"}</td>
      <td class="wide">${delivery.attempts}</td>
      <td class="end">
        <span class="actions"><${Action} run=${() => redeliver(delivery)}>Redeliver<//></span>
      </td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title="Deliveries"
      actions=${html`
        <${Action} run=${live.reload}>Refresh<//>
      `}
      live=${live}
      columns=${[["Queued", "wide"], "State", "Event", ["Object", "wide"], ["Status", "wide"], ["Attempts", "wide"], ""]}
      row=${row}
      empty="Nothing was sent yet."
    />
    ${
      live.value?.length === limit &&
      html`
        <p class="empty"><button type="button" onClick=${() => setLimit(limit + PAGE * 4)}>Show older</button></p>
      `
    }
  `;
}

export default function Webhook({ route }) {
  const [, namespace, , name] = route.parts;
  const owner = `/auth/namespaces/${seg(namespace)}`;
  const path = `${owner}/webhooks/${seg(name)}`;
  const up = [namespace, `${link("namespaces", namespace)}?tab=webhooks`];
  const { value: webhook, error, reload } = useLive(() => get(path), [`namespace/${namespace}`], [path]);
  const [dialog, setDialog] = useState(null);
  const [tests, setTests] = useState(0);
  if (!webhook)
    return html`
      <${Unloaded} title="Webhook" up=${up} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const test = async () => {
    await post(`${path}/test`);
    toast("A test is queued; the log shows its result.");
    setTests((n) => n + 1);
    reload();
  };
  const rotated = (record) => {
    reload();
    setDialog(html`
      <${SecretDialog} title=${`New secret of webhook ${name}`} value=${record.secret} close=${close} />
    `);
  };
  const rotate = () =>
    setDialog(html`
      <${RotateSecret} path=${path} close=${close} done=${rotated} />
    `);
  const change = () =>
    setDialog(html`
      <${WebhookForm} path=${owner} namespace=${namespace} webhook=${webhook} close=${close} done=${reload} />
    `);
  const remove = () =>
    setDialog(html`
      <${DeleteWebhook} path=${owner} webhook=${webhook} close=${close} done=${() => go(up[1])} />
    `);
  return html`
    <${Heading}
      title=${webhook.name}
      up=${up}
      status=${html`
        <${WebhookState} webhook=${webhook} />
      `}
    >
      <${Action} run=${test}>Test<//>
      <button type="button" onClick=${rotate}>Rotate secret</button>
      <button type="button" onClick=${change}>Change</button>
      <button type="button" class="danger" onClick=${remove}>Delete</button>
    <//>
    <${Failure} error=${error} retry=${reload} />
    <${Panel} title="Summary">
      <${Facts}
        rows=${[
          [
            "URL",
            html`
              <code>${webhook.url}</code>
            `,
          ],
          ["Types of events", webhook.event_types.join(", ")],
          ["Types of objects", webhook.object_types.join(", ")],
          ["Start of the message", webhook.message_prefix],
          ["Pending", webhook.pending],
          ["Dropped", webhook.dropped],
          [
            "Last delivery",
            webhook.last_delivered
              ? html`
                  <${Time} value=${webhook.last_delivered} />
                `
              : "never",
          ],
          [
            "Last failure",
            webhook.last_failed
              ? html`
                  <${Time} value=${webhook.last_failed} />
                `
              : "never",
          ],
          ["Last error", webhook.last_error],
          ["Previous secret until", webhook.previous_secret_expires && fullTime(webhook.previous_secret_expires)],
          [
            "UUID",
            html`
              <${CopyId} value=${webhook.uuid} />
            `,
          ],
        ]}
      />
    <//>
    <${Deliveries} path=${path} tests=${tests} changed=${reload} />
    ${dialog}
  `;
}
