// Adds an interface to an instance.
import { html, useState } from "./view.js";
import { post } from "./api.js";
import { networks, useCollection } from "./live.js";
import { Action, Check, Dialog, Failure, Field } from "./parts.js";

export function AddInterface({ path, close }) {
  const nets = useCollection(networks).records;
  const [network, setNetwork] = useState("");
  const [address, setAddress] = useState("");
  const [float, setFloat] = useState(false);
  const [error, setError] = useState(null);
  const chosen = network || nets[0]?.uuid || "";
  const add = async () => {
    await post(`${path}/interfaces`, { network_uuid: chosen, address: address || undefined, float });
    close();
  };
  return html`
    <${Dialog} title="Add interface" close=${close}>
      <div class="body">
        <${Field} label="Network" name="network_uuid" error=${error}>
          <select value=${chosen} onChange=${(event) => setNetwork(event.target.value)}>
            ${nets.map(
              (net) => html`
                <option key=${net.uuid} value=${net.uuid}>${net.name} · ${net.netblock}</option>
              `,
            )}
          </select>
        <//>
        <${Field} label="Address" name="address" error=${error} hint="Empty: a free address is allocated">
          <input value=${address} placeholder="automatic" onInput=${(event) => setAddress(event.target.value)} />
        <//>
        <${Check}
          label="Assign a floating address"
          checked=${float}
          onChange=${(event) => setFloat(event.target.checked)}
        />
        <${Failure} error=${error} />
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" disabled=${!chosen} run=${add} onError=${setError}>Add<//>
      </footer>
    <//>
  `;
}
