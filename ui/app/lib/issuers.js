// Trusted issuers of identity tokens: the forms that create, change and delete one.
import { html } from "./view.js";
import { del, post, put, seg } from "./api.js";
import { ConfirmDelete, Field } from "./parts.js";
import { FormDialog, useForm } from "./forms.js";

/** Creates an issuer, or replaces the terms of `issuer`. */
export function IssuerForm({ issuer, close, done }) {
  const form = useForm({
    name: issuer?.name ?? "",
    issuer_url: issuer?.issuer_url ?? "",
    jwks_uri: issuer?.jwks_uri ?? "",
    audience: issuer?.audience ?? "",
  });
  const save = async ({ name, ...terms }) => {
    if (issuer) await put(`/auth/issuers/${seg(name)}`, terms);
    else await post("/auth/issuers", { name, ...terms });
    close();
    done();
  };
  return html`
    <${FormDialog}
      title=${issuer ? `Change issuer ${issuer.name}` : "Create issuer"}
      form=${form}
      verb=${issuer ? "Save" : "Create"}
      ready=${form.values.name}
      run=${save}
      close=${close}
    >
      <${Field} label="Name" ...${form.field("name")} hint="By which rules refer to it">
        <input ...${form.input("name")} disabled=${Boolean(issuer)} autofocus=${!issuer} />
      <//>
      <${Field} label="Issuer URL" ...${form.field("issuer_url")} hint="Exactly the claim iss of its tokens">
        <input ...${form.input("issuer_url")} placeholder="https://token.actions.githubusercontent.com" />
      <//>
      <${Field} label="URL of its keys" ...${form.field("jwks_uri")} hint="The JSON Web Key Set, over https">
        <input ...${form.input("jwks_uri")} />
      <//>
      <${Field} label="Audience" ...${form.field("audience")} hint="The claim aud that its tokens must have">
        <input ...${form.input("audience")} placeholder="https://cloud.example" />
      <//>
    <//>
  `;
}

/** Asks before an issuer is deleted. */
export const DeleteIssuer = ({ issuer, close, done }) => html`
  <${ConfirmDelete}
    title=${`Delete issuer ${issuer.name}?`}
    items=${[`the issuer ${issuer.name} with the URL ${issuer.issuer_url}; its tokens are rejected at once`]}
    kept="Rules that refer to it are kept, and work again once an issuer of this name exists. Keys are valid until they expire."
    word=${issuer.name}
    run=${async () => {
      await del(`/auth/issuers/${seg(issuer.name)}`);
      done();
    }}
    close=${close}
  />
`;
