// Starts the UI: the session, then the shell and the page of the route.
import { clearAll, closeStream, openStream } from "./lib/live.js";
import { get, post, whenUnauthenticated } from "./lib/api.js";
import { html, render, useEffect, useState } from "./lib/view.js";
import { applyTheme } from "./lib/theme.js";
import { Loading } from "./lib/parts.js";

applyTheme();

/** Takes the one-time ticket out of the address, so that it stays neither there nor in the history. */
function takeTicket() {
  const ticket = /^#ticket=([^&]+)$/.exec(location.hash)?.[1];
  if (ticket) history.replaceState(null, "", location.pathname);
  return ticket ? decodeURIComponent(ticket) : null;
}

async function startSession() {
  const ticket = takeTicket();
  if (!ticket) {
    try {
      return { session: await get("/auth/session", { quiet: true }) };
    } catch (error) {
      return { error: error.status === 401 ? null : error };
    }
  }
  try {
    return { session: await post("/auth/session", { ticket }, { quiet: true }) };
  } catch (error) {
    return { error };
  }
}

function App() {
  const [state, setState] = useState(null);
  const [page, setPage] = useState(null);
  useEffect(() => {
    startSession().then(setState);
    whenUnauthenticated(() => {
      closeStream();
      setState((old) => (old?.session ? { ended: true } : old));
    });
    // A ticket may be opened in a tab that already shows the UI.
    const changed = () => {
      if (location.hash.startsWith("#ticket=")) {
        closeStream();
        clearAll();
        setState(null);
        startSession().then(setState);
      }
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const signedIn = Boolean(state?.session);
  useEffect(() => {
    if (!state) return;
    if (signedIn) openStream();
    else {
      closeStream();
      clearAll();
    }
    const load = signedIn
      ? import("./lib/shell.js").then((module) => module.Shell)
      : import("./pages/login.js").then((module) => module.Login);
    load.then((component) => setPage(() => component));
  }, [signedIn, Boolean(state)]);
  if (!state || !page)
    return html`
      <${Loading} />
    `;
  const Page = page;
  return html`
    <${Page}
      session=${state.session}
      error=${state.error}
      ended=${state.ended}
      signedIn=${(session) => {
        setPage(null);
        setState({ session });
      }}
      signedOut=${() => {
        setPage(null);
        setState({});
      }}
    />
  `;
}

render(
  html`
    <${App} />
  `,
  document.getElementById("app"),
);
