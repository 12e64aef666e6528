//! What the browser stores and sends.

use serde_json::{Value, json};

use crate::chromium::Browser;
use crate::{DESKTOP, Server};

#[test]
fn keeps_secrets_out_of_scripts_urls_and_storage() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let path = server.login_path();
    let ticket = path.rsplit('=').next().unwrap().to_owned();
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load(&path);
    page.wait_for("document.querySelector('h1')?.textContent === 'Overview'");
    assert_eq!(page.evaluate("document.cookie"), json!(""), "scripts cannot read the session");
    let stored = page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }])");
    assert_eq!(stored, json!("[{},{}]"));
    let cookies = page.call("Network.getCookies", &json!({}));
    let session =
        cookies["cookies"].as_array().unwrap().iter().find(|one| one["name"] == "muster_session").unwrap();
    assert_eq!((&session["httpOnly"], &session["sameSite"]), (&json!(true), &json!("Strict")));
    let value = session["value"].as_str().unwrap().to_owned();
    for url in page.requested_urls() {
        // The first URL is the one that the user opened; browsers do not send its fragment.
        let sent = url.split('#').next().unwrap();
        assert!(!sent.contains(&ticket) && !sent.contains(&value), "{url}");
    }

    // The ticket was used.
    drop(page);
    let mut other = browser.open(&server.daemon.url, DESKTOP);
    other.load(&path);
    other.wait_for("document.querySelector('.failure')");
    assert_eq!(other.evaluate("Boolean(testHelpers.field('Key'))"), json!(true));
    other.check();
}

#[test]
fn policy_blocks_inline_code() {
    let Some(mut browser) = Browser::start() else { return };
    let server = Server::start();
    let mut page = browser.open(&server.daemon.url, DESKTOP);
    page.load("/");
    page.wait_for("location.pathname === '/ui/' && testHelpers.field('Key')");
    let blocked = page.evaluate(
        "new Promise((resolve) => {
            const violations = [];
            addEventListener('securitypolicyviolation', (event) => {
                violations.push(event.effectiveDirective);
                if (violations.length === 4) resolve(violations.sort());
            });
            const script = document.createElement('script');
            script.textContent = 'window.inline = true';
            document.body.append(script);
            const style = document.createElement('style');
            style.textContent = 'body { color: red }';
            document.body.append(style);
            try { window.evaluated = (0, window['ev' + 'al'])('1'); } catch { /* blocked */ }
            fetch('http://127.0.0.1:9/').catch(() => {});
        })",
    );
    assert_eq!(blocked, json!(["connect-src", "script-src", "script-src-elem", "style-src-elem"]));
    assert_eq!(page.evaluate("window.inline ?? window.evaluated ?? null"), Value::Null);
}
