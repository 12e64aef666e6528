// The live timeline of all events that the session may see.
import { html, useMemo, useState } from "../lib/view.js";
import { get, seg } from "../lib/api.js";
import { objectsOf, recent, useEvents, useLive, useStreamStatus } from "../lib/live.js";
import { setQuery } from "../lib/router.js";
import { Empty, Failure, Heading, Panel } from "../lib/parts.js";
import { EVENT_TYPES, EventRow } from "../lib/events.js";

const OBJECT_TYPES = ["instance", "network", "artifact", "node", "namespace", "blob", "agentoperation", "upload"];
const MAX_SHOWN = 300;

export default function Events({ route, session, admin }) {
  const [filter, setFilter] = useState({
    type: route.query.get("type") ?? "",
    object: route.query.get("object") ?? "",
    text: route.query.get("text") ?? "",
  });
  const [paused, setPaused] = useState(false);
  const [, tick] = useState(0);
  const [frozen, setFrozen] = useState([]);
  const status = useStreamStatus();
  useEvents(() => {
    if (!paused) tick((n) => n + 1);
  });
  const earlier = useLive(
    () => (admin ? get(`/auth/namespaces/${seg(session.namespace)}/events?limit=100`) : []),
    [],
    [admin],
  );
  const change = (name) => (event) => {
    const next = { ...filter, [name]: event.target.value };
    setFilter(next);
    setQuery(next);
  };
  const toggle = () => {
    if (!paused) setFrozen([...recent]);
    setPaused(!paused);
  };
  const live = paused ? frozen : recent;
  const shown = useMemo(() => {
    const seen = new Set(live.map((event) => event.event_uuid));
    const own = [{ type: "namespace", uuid: session.namespace }];
    const all = [
      ...live,
      ...(earlier.value ?? [])
        .filter((event) => !seen.has(event.event_uuid))
        .map((event) => ({ objects: own, ...event })),
    ];
    const text = filter.text.toLowerCase();
    return all
      .filter(
        (event) =>
          (!filter.type || (event.event_type ?? event.type) === filter.type) &&
          (!filter.object || objectsOf(event).some((object) => object.type === filter.object)) &&
          (!text || JSON.stringify(event).toLowerCase().includes(text)),
      )
      .slice(0, MAX_SHOWN);
  }, [live, live.length, live[0]?.event_uuid, earlier.value, filter]);
  const choice = (name, label, values) => html`
    <select aria-label=${label} value=${filter[name]} onChange=${change(name)}>
      <option value="">${label}: all</option>
      ${values.map(
        (value) => html`
          <option key=${value} value=${value}>${value}</option>
        `,
      )}
    </select>
  `;
  return html`
    <${Heading} title="Events">
      <button type="button" aria-pressed=${paused} onClick=${toggle}>${paused ? "Continue" : "Pause"}</button>
    <//>
    <div class="toolbar">
      <input
        type="search"
        aria-label="Filter events"
        placeholder="Filter: text, UUID, request id"
        value=${filter.text}
        onInput=${change("text")}
      />
      ${choice("type", "Type", EVENT_TYPES)}${choice("object", "Object", OBJECT_TYPES)}
      <span class="count" role="status">
        ${status === "live" && !paused ? "Live" : paused ? "Paused" : "Reconnecting…"}
      </span>
    </div>
    <${Failure} error=${earlier.error} />
    <${Panel} title="Timeline">
      ${
        shown.length === 0
          ? html`
              <${Empty}>No events match. New events appear here as they happen.<//>
            `
          : html`
              <ul class="events">
                ${shown.map(
                  (event) => html`
                    <${EventRow} key=${event.event_uuid} event=${event} objects fresh=${Boolean(event.live)} />
                  `,
                )}
              </ul>
            `
      }
    <//>
  `;
}
