// Login with a namespace and a key. A ticket in the address is exchanged before this page is shown.
import { html, useState } from "../lib/view.js";
import { Failure, Field } from "../lib/parts.js";
import { post } from "../lib/api.js";

export function Login({ error: initial, ended, signedIn }) {
  const [error, setError] = useState(initial);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    setBusy(true);
    try {
      signedIn(
        await post("/auth/session", { namespace: form.get("namespace"), key: form.get("key") }, { quiet: true }),
      );
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`
    <main class="login">
      <form class="panel" onSubmit=${submit}>
        <div class="brand">
          <img src="icon.svg" alt="" width="28" height="28" />
          <h1>Muster</h1>
        </div>
        ${
          ended
            ? html`
                <p class="hint" role="status">The session has ended. Log in again.</p>
              `
            : null
        }
        <${Field} label="Namespace" name="namespace" error=${error}>
          <input name="namespace" autocomplete="username" required autofocus spellcheck="false" />
        <//>
        <${Field} label="Key" name="key" error=${error}>
          <input name="key" type="password" autocomplete="current-password" required />
        <//>
        <${Failure} error=${error} />
        <button class="primary" disabled=${busy}>Log in</button>
        <p class="hint">
          Or run
          <code>muster ui</code>
          on the host: it prints an address with a one-time ticket.
        </p>
      </form>
    </main>
  `;
}
