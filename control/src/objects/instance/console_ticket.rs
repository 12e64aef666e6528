//! Tickets for connections to consoles. See docs/decisions/0080.

use std::sync::Arc;

use muster_types::event::Event;
use muster_types::ids::InstanceId;
use muster_types::key::Secret;
use muster_types::node::NodeApi;
use muster_types::session::{ConsoleKind, ConsoleTicketRecord, TicketPurpose};
use muster_types::spec::Vdi;
use muster_types::terminal::TerminalRequest;
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{console, object, require_created};
use crate::app::App;
use crate::auth::access::TokenLifetime;
use crate::auth::{Caller, Origin, RequestDeadline, scopes};
use crate::objects::agent_operation::terminal;
use crate::objects::audit::with_caller;
use crate::objects::ticket::{self, TicketKey};
use muster_store::instances::{self, InstanceRow};

/// The lifetime of a ticket, in seconds.
const TICKET_LIFETIME: f64 = 30.0;
/// The scope for running commands in guests.
const EXECUTE_SCOPE: &str = "instance.execute";

/// What a ticket allows.
#[derive(Serialize, Deserialize)]
struct ConsoleGrant {
    instance: InstanceId,
    /// Unix time at which the browser session of the creator ends.
    #[serde(default)]
    session_end: Option<u64>,
    #[serde(flatten)]
    console: RequestedConsole,
}

/// A console to connect to.
#[derive(Debug, Serialize, Deserialize)]
pub struct RequestedConsole {
    pub kind: ConsoleKind,
    /// The command that a terminal runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalRequest>,
}

impl RequestedConsole {
    fn check(&self, caller: &Caller, row: &InstanceRow) -> Result<()> {
        let display = if row.spec.video.vdi == Vdi::Vnc { ConsoleKind::Vnc } else { ConsoleKind::Spice };
        match self.kind {
            ConsoleKind::Serial => Ok(()),
            ConsoleKind::Vnc | ConsoleKind::Spice if self.kind == display => Ok(()),
            ConsoleKind::Vnc | ConsoleKind::Spice => Err(Error::Conflict(format!(
                "kind: the display of the instance is {display}, not {}",
                self.kind
            ))),
            ConsoleKind::Terminal if !scopes::grants(caller.scopes.as_deref(), EXECUTE_SCOPE) => {
                Err(Error::Forbidden("token is not scoped for this operation".into()))
            }
            ConsoleKind::Terminal => self.terminal.as_ref().map_or(Ok(()), terminal::check),
        }
    }
}

/// The use of a ticket.
#[derive(Debug)]
pub struct ConsoleUse {
    /// The creator of the ticket.
    pub caller: Caller,
    pub instance: InstanceRow,
    pub console: RequestedConsole,
}

/// Creates a ticket for one connection to a console. Call it on the daemon of the instance's node.
pub async fn create(
    app: &App,
    caller: &Caller,
    node: &Arc<dyn NodeApi>,
    row: &InstanceRow,
    requested: RequestedConsole,
) -> Result<ConsoleTicketRecord> {
    require_created(row)?;
    requested.check(caller, row)?;
    let kind = requested.kind;
    let is_display = matches!(kind, ConsoleKind::Vnc | ConsoleKind::Spice);
    // Also rejects an instance that is not running.
    let password = console::display_password(node, row).await?.filter(|_| is_display);
    let nonce = caller.nonce.clone();
    let nonce =
        nonce.ok_or_else(|| Error::Forbidden("only the key of a namespace can open a console".into()))?;
    let key = TicketKey {
        namespace: caller.namespace.clone(),
        name: caller.key_name.clone(),
        nonce,
        scopes: caller.scopes.clone(),
    };
    let session_end = caller.session_end();
    let grant = serde_json::to_value(ConsoleGrant { instance: row.id, session_end, console: requested })
        .map_err(|error| Error::Internal(format!("failed to serialize a ticket: {error}")))?;
    let (ticket, expires) = ticket::create(app, TicketPurpose::Console, key, grant, TICKET_LIFETIME).await?;
    let event = Event::audit(object(row.id), "console ticket created").with("kind", kind.as_str());
    app.record(caller, with_caller(caller, event));
    Ok(ConsoleTicketRecord {
        ticket: ticket.expose().to_owned(),
        expires,
        path: format!("/instances/{}/console-socket", row.id),
        password: password.map(|password| password.expose().to_owned()),
    })
}

/// Consumes the ticket of a connection to the console of the instance `reference`.
pub async fn redeem(app: &App, ticket: &Secret, reference: &str, origin: Origin<'_>) -> Result<ConsoleUse> {
    let redeemed = ticket::redeem(app, TicketPurpose::Console, ticket).await?;
    let grant: ConsoleGrant = serde_json::from_value(redeemed.grant)
        .map_err(|error| Error::Internal(format!("a stored ticket is malformed: {error}")))?;
    if grant.instance.to_string() != reference {
        return Err(Error::Unauthenticated("the ticket is for another instance".into()));
    }
    let key = redeemed.key;
    let caller = Caller {
        namespace: key.namespace,
        key_name: key.name,
        scopes: key.scopes,
        minted: None,
        request_id: origin.request_id.to_owned(),
        method: "GET".to_owned(),
        path: format!("/instances/{reference}/console-socket"),
        remote: origin.remote.to_owned(),
        deadline: RequestDeadline::default(),
        nonce: Some(key.nonce),
        token: grant.session_end.map(|expires| TokenLifetime { expires, is_session: true }),
        trusting: None,
    };
    let instance = instances::get(&*app.store, grant.instance).await?;
    let instance = instance.filter(|row| caller.may_change(&row.namespace));
    let instance = instance.ok_or_else(|| Error::not_found("instance"))?;
    require_created(&instance)?;
    Ok(ConsoleUse { caller, instance, console: grant.console })
}
