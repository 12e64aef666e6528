// Namespaces.
import { html, useState } from "../lib/view.js";
import { post } from "../lib/api.js";
import { namespaces, useCollection } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { Action, Dialog, Failure, Field, Heading, Loading, State } from "../lib/parts.js";
import { Table } from "../lib/table.js";

const COLUMNS = [
  { id: "name", title: "Name", value: (entry) => entry.name },
  {
    id: "state",
    title: "State",
    value: (entry) => entry.state,
    cell: (entry) => html`
      <${State} value=${entry.state} />
    `,
    phone: "100px",
  },
  { id: "keys", title: "Keys", value: (entry) => entry.keys.length, width: "90px", kind: "wide end" },
  {
    id: "trust",
    title: "Trusts",
    value: (entry) => entry.trust.full.join(", "),
    cell: (entry) => entry.trust.full.join(", ") || "–",
    kind: "wide",
  },
];

function Create({ close }) {
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const create = async () => {
    await post("/auth/namespaces", { namespace: name });
    await namespaces.load();
    close();
    go(link("namespaces", name));
  };
  return html`
    <${Dialog} title="Create namespace" close=${close}>
      <div class="body">
        <${Field} label="Name" name="namespace" error=${error}>
          <input
            value=${name}
            autofocus
            autocomplete="off"
            spellcheck="false"
            onInput=${(event) => setName(event.target.value)}
          />
        <//>
        ${
          error?.field === "namespace"
            ? null
            : html`
                <${Failure} error=${error} />
              `
        }
      </div>
      <footer>
        <button type="button" onClick=${close}>Cancel</button>
        <${Action} class="primary" disabled=${!name} run=${create} onError=${setError}>Create<//>
      </footer>
    <//>
  `;
}

export default function Namespaces({ admin }) {
  const { records, loaded, error } = useCollection(namespaces);
  const [creating, setCreating] = useState(false);
  return html`
    <${Heading} title="Namespaces">
      ${
        admin
          ? html`
              <button type="button" class="primary" onClick=${() => setCreating(true)}>Create namespace</button>
            `
          : null
      }
    <//>
    <${Failure} error=${error} retry=${() => namespaces.load()} />
    ${
      loaded || records.length
        ? html`
            <${Table}
              label="Namespaces"
              records=${records}
              columns=${COLUMNS}
              keyOf=${(entry) => entry.name}
              href=${(entry) => link("namespaces", entry.name)}
              empty="There are no namespaces."
            />
          `
        : error
          ? null
          : html`
              <${Loading} />
            `
    }
    ${
      creating
        ? html`
            <${Create} close=${() => setCreating(false)} />
          `
        : null
    }
  `;
}
