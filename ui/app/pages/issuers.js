// Trusted issuers of identity tokens. Only `system` may read and change them.
import { html, useState } from "../lib/view.js";
import { get } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { link } from "../lib/router.js";
import { Heading, IconButton } from "../lib/parts.js";
import { DeleteIssuer, IssuerForm } from "../lib/issuers.js";
import { TablePanel } from "../lib/table.js";

export default function Issuers() {
  const live = useLive(() => get("/auth/issuers"), ["trusted_issuer/*"], []);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const create = () =>
    setDialog(html`
      <${IssuerForm} close=${close} done=${live.reload} />
    `);
  const remove = (issuer) =>
    setDialog(html`
      <${DeleteIssuer} issuer=${issuer} close=${close} done=${live.reload} />
    `);
  const row = (issuer) => html`
    <tr key=${issuer.name}>
      <td><a class="row-name" href=${link("issuers", issuer.name)}>${issuer.name}</a></td>
      <td><code>${issuer.issuer_url}</code></td>
      <td class="wide"><code>${issuer.jwks_uri}</code></td>
      <td class="wide">${issuer.audience}</td>
      <td class="end">
        <${IconButton} label=${`Delete issuer ${issuer.name}`} icon="close" run=${() => remove(issuer)} />
      </td>
    </tr>
  `;
  return html`
    <${Heading} title="Issuers"><button type="button" class="primary" onClick=${create}>Create issuer</button><//>
    <${TablePanel}
      title="Trusted issuers"
      live=${live}
      columns=${["Name", "Issuer URL", ["URL of its keys", "wide"], ["Audience", "wide"], ""]}
      row=${row}
      empty="No issuer is trusted. Rules of namespaces exchange the identity tokens of trusted issuers for keys."
    />
    ${dialog}
  `;
}
