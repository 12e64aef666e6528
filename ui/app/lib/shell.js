// The frame of all pages: navigation, command palette, theme, state of the event stream.
import { html, useEffect, useLayoutEffect, useState } from "./view.js";
import { useRoute } from "./router.js";
import { useStreamStatus } from "./live.js";
import { isDark, toggleTheme } from "./theme.js";
import { Failure, Icon, Loading, Toasts, toastError } from "./parts.js";
import { del } from "./api.js";

const PAGES = {
  "": () => import("../pages/overview.js"),
  instances: () => import("../pages/instances.js"),
  "instances/new": () => import("../pages/instance-create.js"),
  "instances/*": () => import("../pages/instance.js"),
  "instances/*/console": () => import("../pages/console.js"),
  networks: () => import("../pages/networks.js"),
  "networks/*": () => import("../pages/network.js"),
  artifacts: () => import("../pages/artifacts.js"),
  "artifacts/*": () => import("../pages/artifact.js"),
  blobs: () => import("../pages/blobs.js"),
  "blobs/*": () => import("../pages/blob.js"),
  nodes: () => import("../pages/nodes.js"),
  "nodes/*": () => import("../pages/node.js"),
  namespaces: () => import("../pages/namespaces.js"),
  "namespaces/*": () => import("../pages/namespace.js"),
  "namespaces/*/rules/*": () => import("../pages/rule.js"),
  "namespaces/*/claims/*": () => import("../pages/claim.js"),
  "namespaces/*/webhooks/*": () => import("../pages/webhook.js"),
  issuers: () => import("../pages/issuers.js"),
  "issuers/*": () => import("../pages/issuer.js"),
  operations: () => import("../pages/operations.js"),
  "operations/*/*": () => import("../pages/operation.js"),
  events: () => import("../pages/events.js"),
};

export const NAVIGATION = [
  ["", "Overview", "overview"],
  ["instances", "Instances", "instances"],
  ["networks", "Networks", "networks"],
  ["artifacts", "Artifacts", "artifacts"],
  ["nodes", "Nodes", "nodes", true],
  ["namespaces", "Namespaces", "namespaces"],
  ["issuers", "Issuers", "issuers", true],
  ["operations", "Operations", "operations"],
  ["events", "Events", "events"],
];

/** Returns the first pattern in `PAGES` that matches; `*` is any part. */
function pageOf(parts) {
  const matches = (pattern) => {
    const wanted = pattern.split("/").filter(Boolean);
    return wanted.length === parts.length && wanted.every((part, index) => part === "*" || part === parts[index]);
  };
  return Object.keys(PAGES).find(matches) ?? null;
}

function usePage(route) {
  const id = pageOf(route.parts);
  const [loaded, setLoaded] = useState({});
  useEffect(() => {
    if (id === null) return undefined;
    let current = true;
    PAGES[id]().then(
      (module) => current && setLoaded({ id, Page: module.default }),
      (error) => current && setLoaded({ id, error }),
    );
    return () => {
      current = false;
    };
  }, [id]);
  return { id, ...(loaded.id === id ? loaded : {}) };
}

function Live() {
  const status = useStreamStatus();
  const text = { live: "Live", late: "Connecting…", reconnecting: "Reconnecting…", closed: "Not connected" }[status];
  return html`
    <span class=${`stream-status ${status}`} role="status" title="State of the event stream">${text}</span>
  `;
}

export function Shell({ session, signedOut }) {
  const route = useRoute();
  const { id, Page, error } = usePage(route);
  const [menu, setMenu] = useState(false);
  const [Palette, setPalette] = useState(null);
  const [, redraw] = useState(0);
  const admin = session.namespace === "system";
  const openPalette = () => import("./palette.js").then((module) => setPalette(() => module.Palette), toastError);
  useEffect(() => setMenu(false), [route.path]);
  // Before the page is painted, so that the first key counts.
  useLayoutEffect(() => {
    const key = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !event.target.closest?.(".screen")) {
        event.preventDefault();
        openPalette();
      }
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, []);
  const signOut = async () => {
    try {
      await del("/auth/session", undefined, { quiet: true });
    } catch (failure) {
      if (failure.status !== 401) {
        toastError(failure);
        return;
      }
    }
    location.hash = "";
    signedOut();
  };
  const items = NAVIGATION.filter((entry) => admin || !entry[3]);
  return html`
    <div class=${`shell ${menu ? "menu-open" : ""}`}>
      <a
        class="skip"
        href="#main"
        onClick=${(event) => {
          event.preventDefault();
          document.getElementById("main").focus();
        }}
      >
        Skip to content
      </a>
      <aside>
        <div class="brand">
          <a href="#/">
            <img src="icon.svg" alt="" width="22" height="22" />
            Muster
          </a>
          <button
            type="button"
            class="icon menu"
            aria-label="Menu"
            aria-expanded=${menu}
            onClick=${() => setMenu(!menu)}
          >
            <${Icon} name="menu" />
          </button>
        </div>
        <nav aria-label="Pages">
          ${items.map(
            ([path, title, icon]) => html`
              <a key=${path} href=${`#/${path}`} aria-current=${(route.parts[0] ?? "") === path ? "page" : undefined}>
                <${Icon} name=${icon} />
                ${title}
              </a>
            `,
          )}
        </nav>
        <div class="foot">
          <button type="button" class="search" onClick=${openPalette}>
            Go to…
            <kbd>Ctrl K</kbd>
          </button>
          <div class="who">
            <a href="../docs/" target="_blank">Documentation</a>
          </div>
          <div class="who">
            <span class="name" title="Namespace of this session">${session.namespace}</span>
            <${Live} />
          </div>
          <div class="who">
            <button
              type="button"
              class="quiet"
              onClick=${() => {
                toggleTheme();
                redraw((n) => n + 1);
              }}
            >
              ${isDark() ? "Light theme" : "Dark theme"}
            </button>
            <button type="button" class="quiet" onClick=${signOut}>Log out</button>
          </div>
        </div>
      </aside>
      <main id="main" tabindex="-1">
        ${
          id === null
            ? html`
                <p class="empty">Page not found.</p>
              `
            : error
              ? html`
                  <${Failure} error=${error} />
                `
              : Page
                ? html`
                    <${Page} key=${route.key} route=${route} session=${session} admin=${admin} />
                  `
                : html`
                    <${Loading} />
                  `
        }
      </main>
      ${
        Palette
          ? html`
              <${Palette}
                items=${items}
                close=${() => setPalette(null)}
                signOut=${signOut}
                redraw=${() => redraw((n) => n + 1)}
              />
            `
          : null
      }
      <${Toasts} />
    </div>
  `;
}
