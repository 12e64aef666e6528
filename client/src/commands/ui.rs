//! `muster ui`: the URL of the web UI.

use super::session::Session;

/// Prints the URL of the web UI, with a ticket that logs the browser in.
pub(super) async fn run(session: &Session) -> anyhow::Result<()> {
    let response = session.client.create_login_ticket().await?;
    let ticket = response.clone().value()?.ticket;
    let url = format!("{}/ui/#ticket={ticket}", session.client.url());
    session.print_line(&response, &url)
}
