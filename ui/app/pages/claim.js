// One claim of a namespace: limits and usage, metadata, events.
import { html, useState } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { CopyId, Facts, Failure, Heading, Panel, State, Time, Unloaded } from "../lib/parts.js";
import { ClaimForm, DeleteClaim, claimMeters } from "../lib/claims.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { fullTime, shortId } from "../lib/format.js";

export default function Claim({ route }) {
  const [, namespace, , id] = route.parts;
  const owner = `/auth/namespaces/${seg(namespace)}`;
  const path = `${owner}/claims/${seg(id)}`;
  const up = [namespace, `${link("namespaces", namespace)}?tab=claims`];
  const { value: claim, error, reload } = useLive(() => get(path), ["namespace_claim/*", "instance/*"], [path]);
  const [dialog, setDialog] = useState(null);
  if (!claim)
    return html`
      <${Unloaded} title="Claim" up=${up} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const change = () =>
    setDialog(html`
      <${ClaimForm} path=${owner} claim=${claim} close=${close} done=${reload} />
    `);
  const remove = () =>
    setDialog(html`
      <${DeleteClaim} path=${owner} claim=${claim} close=${close} done=${() => go(up[1])} />
    `);
  const active = claim.coverage_state === "active";
  return html`
    <${Heading}
      title=${`Claim ${shortId(claim.uuid)}`}
      up=${up}
      status=${html`
        <${State} value=${claim.coverage_state} tone=${active ? "good" : "idle"} />
      `}
    >
      ${
        active &&
        html`
          <button type="button" onClick=${change}>Change</button>
        `
      }
      <button type="button" class="danger" onClick=${remove}>Delete</button>
    <//>
    <${Failure} error=${error} retry=${reload} />
    <div class="grid">
      <div class="stack two-thirds">
        <${Panel} title="Summary">
          <${Facts}
            rows=${[
              ...claimMeters(claim),
              [active ? "Expires" : "Expired", fullTime(claim.expires_at)],
              [
                "Changed",
                html`
                  <${Time} value=${claim.updated_at} />
                `,
              ],
              [
                "UUID",
                html`
                  <${CopyId} value=${claim.uuid} />
                `,
              ],
            ]}
          />
        <//>
        <${Timeline} path=${`${path}/events`} type="namespace_claim" uuid=${claim.uuid} />
      </div>
      <div class="stack third"><${Metadata} path=${path} values=${claim.metadata} reload=${reload} /></div>
    </div>
    ${dialog}
  `;
}
