// Adds an interface to an instance.
import { html } from "./view.js";
import { post } from "./api.js";
import { networks, useCollection } from "./live.js";
import { Check, Field } from "./parts.js";
import { FormDialog, useForm } from "./forms.js";

export function AddInterface({ path, close }) {
  const nets = useCollection(networks).records;
  const form = useForm({ network_uuid: "", address: "", float: false });
  const chosen = form.values.network_uuid || nets[0]?.uuid || "";
  const add = async ({ address, float }) => {
    await post(`${path}/interfaces`, { network_uuid: chosen, address: address || undefined, float });
    close();
  };
  return html`
    <${FormDialog} title="Add interface" form=${form} verb="Add" ready=${chosen} run=${add} close=${close}>
      <${Field} label="Network" ...${form.field("network_uuid")}>
        <select ...${form.input("network_uuid")} value=${chosen}>
          ${nets.map(
            (net) => html`
              <option key=${net.uuid} value=${net.uuid}>${net.name} · ${net.netblock}</option>
            `,
          )}
        </select>
      <//>
      <${Field} label="Address" ...${form.field("address")} hint="Empty: a free address is allocated">
        <input ...${form.input("address")} placeholder="automatic" />
      <//>
      <${Check} label="Assign a floating address" ...${form.check("float")} />
    <//>
  `;
}
