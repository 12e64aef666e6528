// Lists of events.
import { html, useMemo, useState } from "./view.js";
import { get } from "./api.js";
import { artifacts, instances, networks, nodes, objectsOf, useEvents, useLive } from "./live.js";
import { Empty, Failure, Loading, Panel } from "./parts.js";
import { duration, fullTime, shortId, time } from "./format.js";
import { link } from "./router.js";

export const EVENT_TYPES = ["audit", "mutate", "status", "usage", "resources", "prune", "historic", "health"];
const MAX_SHOWN = 200;

const PAGES_OF_TYPES = {
  instance: "instances",
  network: "networks",
  artifact: "artifacts",
  blob: "blobs",
  node: "nodes",
  namespace: "namespaces",
};

const COLLECTIONS = { instance: instances, network: networks, artifact: artifacts, node: nodes };

/** A link to an object, by its name if the object is known. */
export function ObjectLink({ type, uuid, name }) {
  const page = PAGES_OF_TYPES[type];
  const known = name ?? COLLECTIONS[type]?.records.get(uuid)?.name;
  const text = known ?? (page && !/^[0-9a-f]{8}-/.test(uuid) ? uuid : `${type} ${shortId(uuid)}`);
  return page
    ? html`
        <a href=${link(page, uuid)}>${text}</a>
      `
    : html`
        <span class="muted">${text}</span>
      `;
}

export function EventRow({ event, objects, fresh }) {
  const extra = event.extra && Object.keys(event.extra).length ? event.extra : null;
  const text = html`
    ${event.message}${
      event.duration
        ? html`
            <span class="muted aside">${duration(event.duration)}</span>
          `
        : null
    }
  `;
  return html`
    <li class=${fresh ? "new-row" : ""}>
      <span class="when" title=${fullTime(event.timestamp)}>${time(event.timestamp)}</span>
      <span class="kind"><span class="tag">${event.event_type ?? event.type}</span></span>
      <div class="text">
        ${
          extra || event.request_id
            ? html`
                <details>
                  <summary>${text}</summary>
                  <pre>
${JSON.stringify({ node: event.node, request_id: event.request_id ?? undefined, ...extra }, null, 1)}</pre>
                </details>
              `
            : text
        }
        ${
          objects
            ? html`
                <span class="objects">
                  ${objectsOf(event)
                    .filter((object) => PAGES_OF_TYPES[object.type])
                    .slice(0, 3)
                    .map(
                      (object) => html`
                        <${ObjectLink} key=${object.uuid} ...${object} />
                      `,
                    )}
                </span>
              `
            : null
        }
      </div>
    </li>
  `;
}

/** The live timeline of one object. `path` is the path of its events. */
export function Timeline({ path, type, uuid, title = "Events" }) {
  const [kind, setKind] = useState("");
  const query = `${path}?limit=${MAX_SHOWN}${kind ? `&event_type=${kind}` : ""}`;
  const { value, error, reload } = useLive(() => get(query), [], [query]);
  const [added, setAdded] = useState([]);
  useEvents((event) => {
    if (objectsOf(event).some((object) => object.type === type && object.uuid === uuid))
      setAdded((old) =>
        event.event_uuid && !old.some((other) => other.event_uuid === event.event_uuid)
          ? [event, ...old].slice(0, MAX_SHOWN)
          : old,
      );
  });
  const shown = useMemo(() => {
    const known = new Set((value ?? []).map((event) => event.event_uuid));
    const live = added.filter(
      (event) => !known.has(event.event_uuid) && (!kind || (event.event_type ?? event.type) === kind),
    );
    return [...live.map((event) => [event, true]), ...(value ?? []).map((event) => [event, false])];
  }, [value, added, kind]);
  const select = html`
    <select aria-label="Type of events" value=${kind} onChange=${(event) => setKind(event.target.value)}>
      <option value="">All types</option>
      ${EVENT_TYPES.map(
        (entry) => html`
          <option key=${entry} value=${entry}>${entry}</option>
        `,
      )}
    </select>
  `;
  return html`
    <${Panel} title=${title} actions=${select}>
      <${Failure} error=${error} retry=${reload} />
      ${
        !value && !error
          ? html`
              <${Loading} />
            `
          : shown.length === 0
            ? html`
                <${Empty}>No events.<//>
              `
            : html`
                <ul class="events">
                  ${shown.map(
                    ([event, fresh]) => html`
                      <${EventRow} key=${event.event_uuid} event=${event} fresh=${fresh} />
                    `,
                  )}
                </ul>
              `
      }
    <//>
  `;
}
