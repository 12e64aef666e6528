// The rules of a namespace: which identity tokens of an issuer get a key.
import { html, useState } from "./view.js";
import { ApiError, del, get, post, put, seg } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { ConfirmDelete, Field, IconButton } from "./parts.js";
import { FormDialog, integer, lines, useForm } from "./forms.js";
import { TablePanel } from "./table.js";
import { duration } from "./format.js";

/** Returns the claims that a rule requires as lines `name=value`, one for each accepted value. */
export const claimLines = (claims) =>
  Object.entries(claims).flatMap(([name, values]) => [values].flat().map((value) => `${name}=${value}`));

/** Returns the claims in lines `name=value`. A name on several lines accepts each of the values. */
function parseClaims(text) {
  const claims = new Map();
  for (const line of lines(text)) {
    const [, name, value] = /^([^=]+)=(.*)$/.exec(line) ?? [];
    if (name === undefined) throw new ApiError(400, { error: `bound_claims: ${line} is not of the form name=value` });
    claims.set(name.trim(), [...(claims.get(name.trim()) ?? []), value.trim()]);
  }
  return Object.fromEntries([...claims].map(([name, values]) => [name, values.length === 1 ? values[0] : values]));
}

/** Creates a rule, or replaces the terms of `rule`. */
export function RuleForm({ path, rule, close, done }) {
  const form = useForm({
    name: rule?.name ?? "",
    issuer: rule?.issuer ?? "",
    bound_claims: rule ? claimLines(rule.bound_claims).join("\n") : "",
    scopes: rule ? rule.scopes.join("\n") : "",
    key_ttl: rule?.key_ttl ?? 900,
    key_name_prefix: rule?.key_name_prefix ?? "",
  });
  const save = async ({ name, ...values }) => {
    const terms = {
      ...values,
      bound_claims: parseClaims(values.bound_claims),
      scopes: lines(values.scopes),
      key_ttl: integer(values.key_ttl),
    };
    if (rule) await put(`${path}/rules/${seg(name)}`, terms);
    else await post(`${path}/rules`, { name, ...terms });
    close();
    done();
  };
  return html`
    <${FormDialog}
      title=${rule ? `Change rule ${rule.name}` : "Create rule"}
      form=${form}
      verb=${rule ? "Save" : "Create"}
      ready=${form.values.name && form.values.issuer}
      run=${save}
      close=${close}
    >
      <div class="columns">
        <${Field} label="Name" ...${form.field("name")}>
          <input ...${form.input("name")} disabled=${Boolean(rule)} autofocus=${!rule} />
        <//>
        <${Field} label="Issuer" ...${form.field("issuer")} hint="The name of a trusted issuer">
          <input ...${form.input("issuer")} />
        <//>
      </div>
      <${Field}
        label="Required claims"
        ...${form.field("bound_claims")}
        hint="One name=value on each line; repeat a name to accept several values"
      >
        <textarea ...${form.input("bound_claims")} placeholder="repository=acme/widgets"></textarea>
      <//>
      <${Field} label="Scopes" ...${form.field("scopes")} hint="Of the keys; one on each line">
        <textarea ...${form.input("scopes")} placeholder="artifact.*"></textarea>
      <//>
      <div class="columns">
        <${Field} label="Lifetime of keys (s)" ...${form.field("key_ttl")} hint="At most a day, 86400">
          <input type="number" min="1" ...${form.input("key_ttl")} />
        <//>
        <${Field} label="Prefix of key names" ...${form.field("key_name_prefix")}>
          <input ...${form.input("key_name_prefix")} />
        <//>
      </div>
    <//>
  `;
}

/** Asks before a rule is deleted. */
export const DeleteRule = ({ path, rule, close, done }) => html`
  <${ConfirmDelete}
    title=${`Delete rule ${rule.name}?`}
    items=${[`the rule ${rule.name} for tokens of ${rule.issuer}`, ...claimLines(rule.bound_claims)]}
    kept="Keys that it has created are valid until they expire."
    run=${async () => {
      await del(`${path}/rules/${seg(rule.name)}`);
      done();
    }}
    close=${close}
  />
`;

export function Rules({ path, namespace }) {
  const live = useLive(() => get(`${path}/rules`), ["mapping_rule/*"], [path]);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const create = () =>
    setDialog(html`
      <${RuleForm} path=${path} close=${close} done=${live.reload} />
    `);
  const remove = (rule) =>
    setDialog(html`
      <${DeleteRule} path=${path} rule=${rule} close=${close} done=${live.reload} />
    `);
  const row = (rule) => html`
    <tr key=${rule.name}>
      <td><a class="row-name" href=${link("namespaces", namespace, "rules", rule.name)}>${rule.name}</a></td>
      <td>${rule.issuer}</td>
      <td>
        ${claimLines(rule.bound_claims).map(
          (line) => html`
            <code class="block">${line}</code>
          `,
        )}
      </td>
      <td class="wide">${rule.scopes.join(", ")}</td>
      <td class="wide">${duration(rule.key_ttl)}</td>
      <td class="end"><${IconButton} label=${`Delete rule ${rule.name}`} icon="close" run=${() => remove(rule)} /></td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title="Rules"
      actions=${html`
        <button type="button" onClick=${create}>Create rule</button>
      `}
      live=${live}
      columns=${["Name", "Issuer", "Required claims", ["Scopes", "wide"], ["Lifetime", "wide"], ""]}
      row=${row}
      empty="No rules. A rule exchanges identity tokens of a trusted issuer, such as those of CI jobs, for keys."
    />
    ${dialog}
  `;
}
