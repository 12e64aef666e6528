// The command palette: pages, objects and actions by name.
import { html, useEffect, useMemo, useRef, useState } from "./view.js";
import { artifacts, instances, networks, useCollection } from "./live.js";
import { go, link } from "./router.js";
import { toggleTheme } from "./theme.js";
import { Dialog } from "./parts.js";

const MAX_SHOWN = 12;

function score(text, words) {
  const lower = text.toLowerCase();
  return words.every((word) => lower.includes(word)) ? (lower.startsWith(words[0] ?? "") ? 2 : 1) : 0;
}

export function Palette({ items, close, signOut, redraw }) {
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState(0);
  const list = useRef();
  const vms = useCollection(instances).records;
  const nets = useCollection(networks).records;
  const images = useCollection(artifacts).records;
  const entries = useMemo(
    () => [
      ...items.map(([path, title]) => ({ kind: "Page", title, run: () => go(`/${path}`) })),
      { kind: "Action", title: "Create instance", run: () => go("/instances/new") },
      { kind: "Action", title: "Create network", run: () => go("/networks?create=1") },
      { kind: "Action", title: "Upload artifact", run: () => go("/artifacts?add=1") },
      {
        kind: "Action",
        title: "Switch theme",
        run: () => {
          toggleTheme();
          redraw();
        },
      },
      { kind: "Action", title: "Log out", run: signOut },
      ...vms.map((vm) => ({
        kind: "Instance",
        title: vm.name,
        extra: `${vm.namespace} ${vm.uuid}`,
        run: () => go(link("instances", vm.uuid)),
      })),
      ...nets.map((net) => ({
        kind: "Network",
        title: net.name,
        extra: net.netblock,
        run: () => go(link("networks", net.uuid)),
      })),
      ...images.map((image) => ({
        kind: "Artifact",
        title: image.name,
        extra: image.source_url,
        run: () => go(link("artifacts", image.uuid)),
      })),
    ],
    [vms, nets, images],
  );
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = useMemo(
    () =>
      entries
        .map((entry) => [score(`${entry.title} ${entry.kind} ${entry.extra ?? ""}`, words), entry])
        .filter(([points]) => points > 0)
        .sort((a, b) => b[0] - a[0])
        .slice(0, MAX_SHOWN)
        .map(([, entry]) => entry),
    [entries, text],
  );
  useEffect(() => setChosen(0), [text]);
  useEffect(() => {
    list.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const run = (entry) => {
    close();
    entry.run();
  };
  const key = (event) => {
    if (event.key === "ArrowDown") setChosen(Math.min(chosen + 1, shown.length - 1));
    else if (event.key === "ArrowUp") setChosen(Math.max(chosen - 1, 0));
    else if (event.key === "Enter" && shown[chosen]) run(shown[chosen]);
    else return;
    event.preventDefault();
  };
  return html`
    <${Dialog} title="Go to" close=${close} disposable>
      <div class="palette">
        <input
          role="combobox"
          aria-label="Page, object or action"
          aria-expanded="true"
          aria-controls="palette-list"
          aria-activedescendant=${`palette-${chosen}`}
          placeholder="Page, object or action"
          autofocus
          value=${text}
          onInput=${(event) => setText(event.target.value)}
          onKeyDown=${key}
        />
        <ul id="palette-list" role="listbox" aria-label="Matches" ref=${list}>
          ${shown.map(
            (entry, index) => html`
              <li
                role="option"
                id=${`palette-${index}`}
                key=${index}
                aria-selected=${index === chosen}
                onMouseMove=${() => setChosen(index)}
                onClick=${() => run(entry)}
              >
                <span>${entry.title}</span>
                <span class="kind">${entry.kind}</span>
              </li>
            `,
          )}
        </ul>
        ${
          shown.length === 0
            ? html`
                <p class="empty">Nothing matches.</p>
              `
            : null
        }
      </div>
    <//>
  `;
}
