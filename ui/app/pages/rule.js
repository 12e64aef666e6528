// One rule of a namespace: terms, metadata, events.
import { html, useState } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { CopyId, Facts, Failure, Heading, Panel, State, Unloaded } from "../lib/parts.js";
import { DeleteRule, RuleForm, claimLines } from "../lib/rules.js";
import { Metadata } from "../lib/metadata.js";
import { Timeline } from "../lib/events.js";
import { duration } from "../lib/format.js";

export default function Rule({ route, admin }) {
  const [, namespace, , name] = route.parts;
  const owner = `/auth/namespaces/${seg(namespace)}`;
  const path = `${owner}/rules/${seg(name)}`;
  const up = [namespace, `${link("namespaces", namespace)}?tab=rules`];
  const { value: rule, error, reload } = useLive(() => get(path), ["mapping_rule/*"], [path]);
  const [dialog, setDialog] = useState(null);
  if (!rule)
    return html`
      <${Unloaded} title="Rule" up=${up} error=${error} retry=${reload} />
    `;
  const close = () => setDialog(null);
  const change = () =>
    setDialog(html`
      <${RuleForm} path=${owner} rule=${rule} close=${close} done=${reload} />
    `);
  const remove = () =>
    setDialog(html`
      <${DeleteRule} path=${owner} rule=${rule} close=${close} done=${() => go(up[1])} />
    `);
  return html`
    <${Heading}
      title=${rule.name}
      up=${up}
      status=${html`
        <${State} value=${rule.state} />
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
                "Issuer",
                admin
                  ? html`
                      <a href=${link("issuers", rule.issuer)}>${rule.issuer}</a>
                    `
                  : rule.issuer,
              ],
              [
                "Required claims",
                claimLines(rule.bound_claims).map(
                  (line) => html`
                    <code class="block" key=${line}>${line}</code>
                  `,
                ),
              ],
              ["Scopes of keys", rule.scopes.join(", ")],
              ["Lifetime of keys", duration(rule.key_ttl)],
              ["Prefix of key names", rule.key_name_prefix],
              [
                "UUID",
                html`
                  <${CopyId} value=${rule.uuid} />
                `,
              ],
            ]}
          />
        <//>
        <${Timeline} path=${`${path}/events`} type="mapping_rule" uuid=${rule.uuid} />
      </div>
      <div class="stack third"><${Metadata} path=${path} values=${rule.metadata} reload=${reload} /></div>
    </div>
    ${dialog}
  `;
}
