// The claims of a namespace: capacity of the cluster that is reserved for it.
import { html, useState } from "./view.js";
import { del, get, post, put, seg } from "./api.js";
import { useLive } from "./live.js";
import { link } from "./router.js";
import { ConfirmDelete, Field, IconButton, Meter, State } from "./parts.js";
import { FormDialog, integer, useForm } from "./forms.js";
import { TablePanel } from "./table.js";
import { fullTime, number, shortId } from "./format.js";

const HOUR = 3600;

/** The limits of a claim: name, title, and the name of the usage. */
const LIMITS = [
  ["limit_cpus", "CPUs", "used_cpus"],
  ["limit_memory_mb", "Memory (MB)", "used_memory_mb"],
  ["limit_disk_gb", "Disk (GB)", "used_disk_gb"],
];

/** The usage of each limit of a claim. */
export const claimMeters = (claim) =>
  LIMITS.map(([limit, title, used]) => [
    title,
    html`
      <${Meter}
        label=${title}
        used=${claim[used]}
        total=${claim[limit]}
        text=${`${number(claim[used])} of ${number(claim[limit])}`}
      />
    `,
  ]);

/** Creates a claim, or changes `claim`. */
export function ClaimForm({ path, claim, close, done }) {
  const form = useForm({
    limit_cpus: claim?.limit_cpus ?? "",
    limit_memory_mb: claim?.limit_memory_mb ?? "",
    limit_disk_gb: claim?.limit_disk_gb ?? "",
    expires_in_seconds: claim ? "" : 24,
  });
  const save = async (values) => {
    const hours = integer(values.expires_in_seconds);
    const body = {
      ...Object.fromEntries(LIMITS.map(([name]) => [name, integer(values[name])])),
      expires_in_seconds: typeof hours === "number" ? hours * HOUR : hours,
    };
    if (claim) await put(`${path}/claims/${seg(claim.uuid)}`, body);
    else await post(`${path}/claims`, body);
    close();
    done();
  };
  return html`
    <${FormDialog}
      title=${claim ? "Change claim" : "Create claim"}
      form=${form}
      verb=${claim ? "Save" : "Create"}
      run=${save}
      close=${close}
    >
      <div class="columns">
        ${LIMITS.map(
          ([name, title], index) => html`
            <${Field} key=${name} label=${title} ...${form.field(name)}>
              <input type="number" min="0" ...${form.input(name)} autofocus=${index === 0} />
            <//>
          `,
        )}
      </div>
      <${Field}
        label="Expires after (hours)"
        ...${form.field("expires_in_seconds")}
        hint=${claim ? `Empty: ${fullTime(claim.expires_at)}, as before` : "The capacity is available to others afterwards"}
      >
        <input type="number" min="1" ...${form.input("expires_in_seconds")} />
      <//>
    <//>
  `;
}

/** Asks before a claim is deleted. */
export const DeleteClaim = ({ path, claim, close, done }) => html`
  <${ConfirmDelete}
    title="Delete claim?"
    items=${[
      `the claim of ${claim.namespace} to ${number(claim.limit_cpus)} CPUs, ${number(claim.limit_memory_mb)} MB of memory and ` +
        `${number(claim.limit_disk_gb)} GB of disk`,
      "its events",
    ]}
    kept="Instances keep running. The unused capacity is available to other namespaces at once."
    run=${async () => {
      await del(`${path}/claims/${seg(claim.uuid)}`);
      done();
    }}
    close=${close}
  />
`;

export function Claims({ path, namespace }) {
  const live = useLive(() => get(`${path}/claims`), ["namespace_claim/*"], [path]);
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const create = () =>
    setDialog(html`
      <${ClaimForm} path=${path} close=${close} done=${live.reload} />
    `);
  const remove = (claim) =>
    setDialog(html`
      <${DeleteClaim} path=${path} claim=${claim} close=${close} done=${live.reload} />
    `);
  const row = (claim) => html`
    <tr key=${claim.uuid}>
      <td>
        <a class="row-name" href=${link("namespaces", namespace, "claims", claim.uuid)}>${shortId(claim.uuid)}</a>
      </td>
      <td><${State} value=${claim.coverage_state} tone=${claim.coverage_state === "active" ? "good" : "idle"} /></td>
      ${claimMeters(claim).map(
        ([title, meter]) => html`
          <td key=${title} class="wide">${meter}</td>
        `,
      )}
      <td>${fullTime(claim.expires_at)}</td>
      <td class="end">
        <${IconButton} label=${`Delete claim ${shortId(claim.uuid)}`} icon="close" run=${() => remove(claim)} />
      </td>
    </tr>
  `;
  return html`
    <${TablePanel}
      title="Claims"
      actions=${html`
        <button type="button" onClick=${create}>Create claim</button>
      `}
      live=${live}
      columns=${["Claim", "State", ...LIMITS.map(([, title]) => [title, "wide"]), "Expires", ""]}
      row=${row}
      empty="No claims. A claim reserves capacity of the cluster for this namespace until it expires."
    />
    ${dialog}
  `;
}
