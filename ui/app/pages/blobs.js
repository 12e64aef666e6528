// The list of blobs, for administrators.
import { html, useState } from "../lib/view.js";
import { blobs, useCollection } from "../lib/live.js";
import { link } from "../lib/router.js";
import { Failure, Heading, Loading, State } from "../lib/parts.js";
import { Table } from "../lib/table.js";
import { bytes, plural } from "../lib/format.js";

const COLUMNS = [
  {
    id: "uuid",
    title: "UUID",
    value: (blob) => blob.uuid,
    width: "minmax(0, 2fr)",
    phone: "minmax(0, 1.5fr)",
  },
  {
    id: "state",
    title: "State",
    value: (blob) => blob.state,
    cell: (blob) => html`
      <${State} value=${blob.state} />
    `,
    width: "minmax(90px, .7fr)",
    phone: "90px",
  },
  { id: "copies", title: "Copies", value: (blob) => blob.locations.join(", "), kind: "wide" },
  { id: "references", title: "References", value: (blob) => blob.reference_count, kind: "wide end", width: "96px" },
  {
    id: "size",
    title: "Size",
    value: (blob) => blob.size,
    cell: (blob) => bytes(blob.size),
    kind: "end",
    width: "90px",
    phone: "80px",
  },
];

export default function Blobs() {
  const { records, loaded, error } = useCollection(blobs);
  const [filter, setFilter] = useState("");
  const shown = records.filter((blob) =>
    `${blob.uuid} ${blob.state} ${blob.locations.join(" ")} ${blob.sha512 ?? ""}`
      .toLowerCase()
      .includes(filter.toLowerCase()),
  );
  return html`
    <${Heading} title="Blobs" up=${["Artifacts", "#/artifacts"]} />
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter blobs"
        placeholder="UUID, checksum or node"
        value=${filter}
        onInput=${(event) => setFilter(event.target.value)}
      />
      <span class="count" role="status">${plural(shown.length, "blob")}</span>
    </div>
    <${Failure} error=${error} retry=${() => blobs.load()} />
    ${
      !loaded && !records.length
        ? error
          ? null
          : html`
              <${Loading} />
            `
        : html`
            <${Table}
              label="Blobs"
              records=${shown}
              columns=${COLUMNS}
              keyOf=${(blob) => blob.uuid}
              href=${(blob) => link("blobs", blob.uuid)}
              empty="There are no blobs."
            />
          `
    }
  `;
}
