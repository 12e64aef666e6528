//! Invitations, with which new hosts get the settings of the cluster once. See docs/decisions/0056.

use muster_store::{cluster_values, transaction};
use muster_types::event::Event;
use muster_types::invitation::{InvitationRecord, InvitationToken, JoinSettings, RedeemedInvitation};
use muster_types::namespace::SYSTEM_NAMESPACE;
use muster_types::object::ObjectRef;
use muster_types::time::now;
use muster_types::{Error, Result};

use super::node_location::storage_node;
use crate::app::App;
use crate::auth::Caller;
use crate::objects::audit::with_caller;

/// The prefix of the cluster values that store when invitations expire.
const STORED_AS: &str = "NODE_INVITATION_";
/// The maximum lifetime of an invitation, in seconds.
const MAX_LIFETIME: u64 = 7 * 86400;

/// Creates an invitation that expires after `lifetime` seconds.
pub async fn create(app: &App, caller: &Caller, lifetime: u64) -> Result<InvitationRecord> {
    if !(1..=MAX_LIFETIME).contains(&lifetime) {
        return Err(Error::Invalid(format!("expires_in: must be between 1 and {MAX_LIFETIME} seconds")));
    }
    let database_url = app.settings.database_url.expose();
    check_database_url(database_url).map_err(Error::Conflict)?;
    let api_url = storage_node(app)?.report().await?.api_url;
    if hosts(&api_url).any(is_loopback) {
        return Err(Error::Conflict(format!(
            "this daemon listens on {api_url}, which another host cannot reach: start it with --listen 0.0.0.0:{}",
            app.settings.api_port
        )));
    }
    let id = uuid::Uuid::new_v4().simple().to_string();
    #[expect(clippy::cast_precision_loss, reason = "at most some days")]
    let expires = now() + lifetime as f64;
    let name = format!("{STORED_AS}{id}");
    transaction!(app.store, |tx| {
        for (name, expires) in cluster_values::with_prefix(&mut *tx, STORED_AS).await? {
            if is_expired(&expires) {
                cluster_values::remove(tx, &name).await?;
            }
        }
        Ok(cluster_values::insert(tx, &name, &expires.to_string()).await?)
    })?;
    let event =
        Event::audit(ObjectRef::namespace(SYSTEM_NAMESPACE), "host invited").with("invitation", id.clone());
    app.record(caller, with_caller(caller, event));
    Ok(InvitationRecord { token: InvitationToken::new(&api_url, &id, app.peers.seed()).to_text(), expires })
}

/// Returns the settings of the cluster to a host that proves to have the token of an invitation. An invitation can be
/// used once.
pub async fn redeem(app: &App, id: &str, proof: &str, remote: &str) -> Result<RedeemedInvitation> {
    let invalid = || Error::NotFound("the invitation does not exist, was used, or has expired".into());
    let token = InvitationToken::new("", id, app.peers.seed());
    if !token.verify(proof) {
        return Err(invalid());
    }
    let name = format!("{STORED_AS}{id}");
    let expires = transaction!(app.store, |tx| {
        let Some(expires) = cluster_values::get(&mut *tx, &name).await? else { return Ok(None) };
        // The one that removes the row has used the invitation.
        Ok(cluster_values::remove(tx, &name).await?.then_some(expires))
    })?;
    if expires.is_none_or(|expires| is_expired(&expires)) {
        return Err(invalid());
    }
    let settings = JoinSettings {
        database_url: app.settings.database_url.clone(),
        auth_secret_seed: app.peers.seed().clone(),
    };
    let sealed =
        token.seal(&settings).ok_or_else(|| Error::Internal("failed to encrypt the settings".into()))?;
    let event = Event::audit(ObjectRef::namespace(SYSTEM_NAMESPACE), "invitation used by a host");
    app.events.record(event.with("invitation", id).with("remote", remote));
    Ok(RedeemedInvitation { sealed })
}

fn is_expired(expires: &str) -> bool {
    expires.parse::<f64>().is_ok_and(|expires| expires <= now())
}

/// Checks that another host can use the database of this daemon.
fn check_database_url(url: &str) -> Result<(), String> {
    if !url.starts_with("mysql:") {
        return Err(
            "a cluster of several hosts needs a MariaDB: set DATABASE_URL to mysql://…, or MARIADB_HOST, on this node, \
             see docs/hosts.md"
                .into(),
        );
    }
    match hosts(url).find(|host| is_loopback(host)) {
        Some(host) => Err(format!(
            "DATABASE_URL or MARIADB_HOST of this node has the host {host}, which another host cannot reach: set it to an \
             address that all hosts reach, and restart this daemon"
        )),
        None => Ok(()),
    }
}

/// Returns the hosts of a URL, which may have several.
fn hosts(url: &str) -> impl Iterator<Item = &str> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    hosts.split(',').map(|host| match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_databases_that_other_hosts_cannot_reach() {
        for url in [
            "mysql://u:p@db.example/m",
            "mysql://u:p%40x@10.0.0.1:3306,10.0.0.2/m",
            "mysql://u@[fd00::1]:3306/m",
        ] {
            assert_eq!(check_database_url(url), Ok(()), "{url}");
        }
        for url in ["mysql://u:p@localhost/m", "mysql://u:p@10.0.0.1,127.0.0.1:3306/m", "mysql://u@[::1]/m"] {
            assert!(check_database_url(url).unwrap_err().contains("cannot reach"), "{url}");
        }
        assert!(check_database_url("").unwrap_err().contains("MariaDB"));
    }
}
