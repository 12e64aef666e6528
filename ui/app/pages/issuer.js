// One trusted issuer: terms, metadata, events.
import { html, useState } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { go } from "../lib/router.js";
import { CopyId, Facts, Failure, Heading, Panel, State, Unloaded } from "../lib/parts.js";
import { DeleteIssuer, IssuerForm } from "../lib/issuers.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";

export default function Issuer({ route }) {
  const path = `/auth/issuers/${seg(route.parts[1])}`;
  const up = ["Issuers", "#/issuers"];
  const { value: issuer, error, reload } = useLive(() => get(path), ["trusted_issuer/*"], [path]);
  const [dialog, setDialog] = useState(null);
  if (!issuer)
    return html`
      <${Unloaded} title="Issuer" up=${up} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const change = () =>
    setDialog(html`
      <${IssuerForm} issuer=${issuer} close=${close} done=${reload} />
    `);
  const remove = () =>
    setDialog(html`
      <${DeleteIssuer} issuer=${issuer} close=${close} done=${() => go("/issuers")} />
    `);
  return html`
    <${Heading}
      title=${issuer.name}
      up=${up}
      status=${html`
        <${State} value=${issuer.state} />
      `}
    >
      <button type="button" onClick=${change}>Change</button>
      <button type="button" class="danger" onClick=${remove}>Delete</button>
    <//>
    <${Failure} error=${error} retry=${reload} />
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel} title="Summary">
          <${Facts}
            rows=${[
              [
                "Issuer URL",
                html`
                  <code>${issuer.issuer_url}</code>
                `,
              ],
              [
                "URL of its keys",
                html`
                  <code>${issuer.jwks_uri}</code>
                `,
              ],
              ["Audience", issuer.audience],
              [
                "UUID",
                html`
                  <${CopyId} value=${issuer.uuid} />
                `,
              ],
            ]}
          />
        <//>
        <${Timeline} path=${`${path}/events`} type="trusted_issuer" uuid=${issuer.uuid} />
      </div>
      <div class="stack third"><${Metadata} path=${path} values=${issuer.metadata} reload=${reload} /></div>
    </div>
    ${dialog}
  `;
}
