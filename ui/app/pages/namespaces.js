// Namespaces.
import { html, useState } from "../lib/view.js";
import { post } from "../lib/api.js";
import { namespaces, useCollection } from "../lib/live.js";
import { go, link } from "../lib/router.js";
import { Failure, Field, Heading, Loading, State } from "../lib/parts.js";
import { FormDialog, useForm } from "../lib/forms.js";
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
  const form = useForm({ namespace: "" });
  const create = async ({ namespace }) => {
    await post("/auth/namespaces", { namespace });
    await namespaces.load();
    close();
    go(link("namespaces", namespace));
  };
  return html`
    <${FormDialog}
      title="Create namespace"
      form=${form}
      verb="Create"
      ready=${form.values.namespace}
      run=${create}
      close=${close}
    >
      <${Field} label="Name" ...${form.field("namespace")}><input ...${form.input("namespace")} autofocus /><//>
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
