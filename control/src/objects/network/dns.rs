//! DNS entries of networks.

use std::net::Ipv4Addr;

use muster_types::event::Event;
use muster_types::{Error, Result};

use super::state::{USABLE, changed, require_state};
use super::{find_own, object, wait};
use crate::app::App;
use crate::auth::Caller;
use muster_store::networks::NetworkRow;
use muster_store::{dns_entries, networks, transaction};

/// The maximum number of DNS entries of a network, besides those of its interfaces.
const MAX_DNS_ENTRIES: i64 = 1000;

/// Creates or replaces a DNS entry of a network.
pub async fn set(
    app: &App,
    caller: &Caller,
    reference: &str,
    name: Option<&str>,
    value: Option<&str>,
) -> Result<()> {
    let required = |name: &str| Error::Invalid(format!("{name}: Missing data for required field."));
    let name = name.ok_or_else(|| required("name"))?;
    let value = value.ok_or_else(|| required("value"))?;
    let value: Ipv4Addr =
        value.parse().map_err(|_| Error::Invalid("value: must be an IPv4 address".into()))?;
    let name = check_dns_name(name)?;
    let row = require_resolver(app, caller, reference).await?;
    transaction!(app.store, |tx| {
        if !networks::bump_generation(tx, row.id, USABLE).await? {
            return Err(changed(tx, row.id).await);
        }
        dns_entries::set(tx, row.id, &name, value).await?;
        if dns_entries::count(&mut *tx, row.id).await? > MAX_DNS_ENTRIES {
            let text = format!("name: a network can have at most {MAX_DNS_ENTRIES} names");
            return Err(Error::Invalid(text).into());
        }
        Ok(())
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "update DNS entry request from REST API")
            .with("name", name)
            .with("value", value.to_string()),
    );
    wait::wait_applied(app, row.id).await
}

/// Removes a DNS entry of a network, if it exists.
pub async fn remove(app: &App, caller: &Caller, reference: &str, name: Option<&str>) -> Result<()> {
    let name = name.ok_or_else(|| Error::Invalid("name: Missing data for required field.".into()))?;
    let name = check_dns_name(name)?;
    let row = require_resolver(app, caller, reference).await?;
    let existed = transaction!(app.store, |tx| {
        if !networks::bump_generation(tx, row.id, USABLE).await? {
            return Err(changed(tx, row.id).await);
        }
        Ok(dns_entries::remove(tx, row.id, &name).await?)
    })?;
    app.record(
        caller,
        Event::audit(object(row.id), "remove DNS entry request from REST API")
            .with("name", name)
            .with("known", existed),
    );
    wait::wait_applied(app, row.id).await
}

async fn require_resolver(app: &App, caller: &Caller, reference: &str) -> Result<NetworkRow> {
    let row = find_own(app, caller, reference, None).await?;
    require_state(&row, USABLE)?;
    if row.provide_dns { Ok(row) } else { Err(Error::NotReady("network does not provide DNS".into())) }
}

/// Checks a host name and returns it in lower case.
fn check_dns_name(name: &str) -> Result<String> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    // Resolvers would parse it as an address.
    let address = name.parse::<Ipv4Addr>().is_ok();
    if name.len() <= 253 && name.split('.').all(label) && !address {
        Ok(name.to_ascii_lowercase())
    } else {
        Err(Error::NotReady("invalid DNS name".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_host_names_as_dns_entries() {
        for name in ["web", "Web-1", "a.b.example", "1"] {
            assert_eq!(check_dns_name(name).unwrap(), name.to_lowercase());
        }
        let long = "a".repeat(64);
        for name in
            ["", ".", "a..b", "-a", "a-", "a b", "a\nb", "a_b", "é", "a/24", "#", &long, "a.", "10.0.0.1"]
        {
            assert!(check_dns_name(name).is_err(), "{name}");
        }
    }
}
