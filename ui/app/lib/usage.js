// Usage of an instance as charts, from its usage events.
import { html } from "./view.js";
import { get } from "./api.js";
import { useLive } from "./live.js";
import { Panel } from "./parts.js";
import { bytes, time } from "./format.js";

const MAX_POINTS = 60;
const WIDTH = 300;
const HEIGHT = 44;

const sum = (parts, name) => Object.values(parts ?? {}).reduce((total, part) => total + (part[name] ?? 0), 0);

/** Each chart: title, the counter in an event, and the text of a rate per second. */
const CHARTS = [
  [
    "CPU",
    (extra) => (extra["cpu usage"]?.["cpu time ns"] ?? 0) / 1e9,
    (rate) => `${(rate * 100).toFixed(1)} % of a CPU`,
  ],
  [
    "Network",
    (extra) => sum(extra["network usage"], "read bytes") + sum(extra["network usage"], "write bytes"),
    (rate) => `${bytes(rate)}/s`,
  ],
  [
    "Disk",
    (extra) => sum(extra["disk usage"], "read bytes") + sum(extra["disk usage"], "write bytes"),
    (rate) => `${bytes(rate)}/s`,
  ],
];

/** Returns the rates between counters. A counter that decreases was reset by a restart. */
function rates(events, counter) {
  const found = [];
  for (let index = 1; index < events.length; index++) {
    const seconds = events[index].timestamp - events[index - 1].timestamp;
    const difference = counter(events[index].extra) - counter(events[index - 1].extra);
    if (seconds > 0 && difference >= 0) found.push(difference / seconds);
  }
  return found;
}

function Chart({ title, values, text, since }) {
  const top = Math.max(...values, 1e-9) * 1.25;
  const point = (value, index) =>
    `${(index / Math.max(1, values.length - 1)) * WIDTH} ${HEIGHT - 2 - (value / top) * (HEIGHT - 6)}`;
  const line = `M ${values.map(point).join(" L ")}`;
  return html`
    <figure class="chart">
      <figcaption>
        <span>${title}</span>
        <span class="muted">${text(values.at(-1))}</span>
      </figcaption>
      <svg
        viewBox=${`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label=${`${title} since ${since}: now ${text(values.at(-1))}, at most ${text(top / 1.25)}`}
      >
        <path class="area" d=${`${line} L ${WIDTH} ${HEIGHT} L 0 ${HEIGHT} Z`} />
        <path class="curve" d=${line} />
      </svg>
    </figure>
  `;
}

export function Usage({ path, uuid }) {
  const { value } = useLive(
    () => get(`${path}/events?event_type=usage&limit=${MAX_POINTS}`),
    [`instance/${uuid}`],
    [path],
    { measured: true },
  );
  const events = [...(value ?? [])].reverse();
  if (events.length < 3) return null;
  return html`
    <${Panel} title="Usage">
      <div class="body stack">
        ${CHARTS.map(([title, counter, text]) => {
          const values = rates(events, counter);
          return values.length > 1
            ? html`
                <${Chart}
                  key=${title}
                  title=${title}
                  values=${values}
                  text=${text}
                  since=${time(events[0].timestamp)}
                />
              `
            : null;
        })}
      </div>
    <//>
  `;
}
