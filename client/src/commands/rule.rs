//! `muster rule`.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use muster_types::object::ObjectType;
use muster_types::rule::{BoundClaims, ClaimMatcher, RuleRecord, RuleTerms};

use super::events::{self, EventFilter};
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use crate::api::ObjectPath;
use crate::output::Table;

const LIST: ListView<RuleRecord> =
    ListView { table, wide: &["state", "uuid"], order: &[], watched: &[ObjectType::Rule] };

/// Commands for mapping rules.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the mapping rules of a namespace
    List {
        namespace: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a mapping rule
    Show { namespace: String, name: String },
    /// Add a mapping rule
    Create {
        namespace: String,
        name: String,
        /// Name of the trusted issuer
        #[arg(long)]
        issuer: String,
        /// Required claim of a token; of several values for one name, one must match
        #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = parse_claim, required = true)]
        claims: Vec<(String, String)>,
        /// Scope of the keys, such as artifact.read or artifact.*
        #[arg(long = "scope", value_name = "SCOPE", required = true)]
        scopes: Vec<String>,
        /// Lifetime of the keys, at most a day
        #[arg(long, value_name = "SECONDS")]
        ttl: i64,
        /// Prefix of the key names
        #[arg(long)]
        prefix: String,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Change a mapping rule; options that are not given keep their value
    Update {
        namespace: String,
        name: String,
        #[command(flatten)]
        changes: RuleChanges,
    },
    /// Delete a mapping rule; its keys are kept
    Delete { namespace: String, name: String },
    /// Show the events of a mapping rule, such as refused exchanges, newest first
    Events {
        namespace: String,
        name: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the metadata of a mapping rule
    Metadata { namespace: String, name: String },
    /// Set a metadata key of a mapping rule
    SetMetadata {
        namespace: String,
        name: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a mapping rule
    DeleteMetadata {
        namespace: String,
        name: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// Changes of a mapping rule.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct RuleChanges {
    /// Name of the trusted issuer
    #[arg(long)]
    issuer: Option<String>,
    /// Required claim of a token; replaces all previous claims
    #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = parse_claim)]
    claims: Vec<(String, String)>,
    /// Scope of the keys; replaces all previous scopes
    #[arg(long = "scope", value_name = "SCOPE")]
    scopes: Vec<String>,
    /// Lifetime of the keys, at most a day
    #[arg(long, value_name = "SECONDS")]
    ttl: Option<i64>,
    /// Prefix of the key names
    #[arg(long)]
    prefix: Option<String>,
}

impl RuleChanges {
    /// Returns the terms of a rule with the changes applied.
    fn apply_to(self, current: RuleRecord) -> RuleTerms {
        RuleTerms {
            issuer: self.issuer.unwrap_or(current.issuer),
            bound_claims: if self.claims.is_empty() {
                current.bound_claims
            } else {
                bind_claims(self.claims)
            },
            scopes: if self.scopes.is_empty() { current.scopes } else { self.scopes },
            key_ttl: self.ttl.unwrap_or(current.key_ttl),
            key_name_prefix: self.prefix.unwrap_or(current.key_name_prefix),
        }
    }
}

/// Parses a claim. Values may contain an equals sign, names cannot.
fn parse_claim(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Groups claims by name. Several values of a claim are alternatives.
fn bind_claims(claims: Vec<(String, String)>) -> BoundClaims {
    let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in claims {
        values.entry(name).or_default().push(value);
    }
    let matcher = |mut values: Vec<String>| match values.pop() {
        Some(only) if values.is_empty() => ClaimMatcher::Exact(only),
        last => {
            values.extend(last);
            ClaimMatcher::AnyOf(values)
        }
    };
    values.into_iter().map(|(name, values)| (name, matcher(values))).collect()
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.rules(&namespace, &query)).await
        }
        Command::Show { namespace, name } => session.show(client.rule(&namespace, &name).await?, details),
        Command::Create { namespace, name, issuer, claims, scopes, ttl, prefix, dry_run } => {
            let bound_claims = bind_claims(claims);
            let terms = RuleTerms { issuer, bound_claims, scopes, key_ttl: ttl, key_name_prefix: prefix };
            let response = client.with_dry_run(dry_run).create_rule(&namespace, &name, &terms).await?;
            session.show_created(response, dry_run, details)
        }
        Command::Update { namespace, name, changes } => {
            let terms = changes.apply_to(client.rule(&namespace, &name).await?.value()?);
            session.show(client.update_rule(&namespace, &name, &terms).await?, details)
        }
        Command::Delete { namespace, name } => {
            let response = client.delete_rule(&namespace, &name).await?;
            session.confirm(&response, &format!("rule {name} deleted"))
        }
        Command::Events { namespace, name, filter } => {
            events::show(session, ObjectPath::Rule(&namespace, &name), &filter).await
        }
        Command::Metadata { namespace, name } => {
            metadata::show(session, ObjectPath::Rule(&namespace, &name)).await
        }
        Command::SetMetadata { namespace, name, item } => {
            metadata::set(session, ObjectPath::Rule(&namespace, &name), &item).await
        }
        Command::DeleteMetadata { namespace, name, item } => {
            metadata::delete(session, ObjectPath::Rule(&namespace, &name), &item).await
        }
    }
}

fn values(matcher: &ClaimMatcher) -> String {
    match matcher {
        ClaimMatcher::Exact(value) => value.clone(),
        ClaimMatcher::AnyOf(values) => values.join(" or "),
    }
}

fn table(rules: Vec<RuleRecord>) -> Table {
    let claims = |rule: &RuleRecord| {
        let each = rule.bound_claims.iter().map(|(name, matcher)| format!("{name}={}", values(matcher)));
        each.collect::<Vec<_>>().join(", ")
    };
    Table::new(&["NAME", "ISSUER", "SECONDS", "PREFIX"], &["CLAIMS", "SCOPES"]).rows(rules.into_iter().map(
        |rule| {
            let (claims, scopes) = (claims(&rule), rule.scopes.join(", "));
            [rule.name, rule.issuer, rule.key_ttl.to_string(), rule.key_name_prefix, claims, scopes]
        },
    ))
}

fn details(rule: RuleRecord) -> Table {
    let claims = rule.bound_claims.iter().map(|(name, matcher)| (format!("claim {name}"), values(matcher)));
    let details = [
        ("uuid", rule.uuid.to_string()),
        ("namespace", rule.namespace),
        ("name", rule.name),
        ("state", rule.state.to_string()),
        ("issuer", rule.issuer),
        ("scopes", rule.scopes.join(", ")),
        ("seconds", rule.key_ttl.to_string()),
        ("prefix", rule.key_name_prefix),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(claims))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn example() -> Value {
        json!({ "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "version": 1, "metadata": {},
                "namespace": "ci", "name": "deploy", "issuer": "forge",
                "bound_claims": { "sub": "repo:x", "ref": ["main", "next"] },
                "scopes": ["artifact.*", "blob.read"], "key_ttl": 600, "key_name_prefix": "robot" })
    }

    #[test]
    fn lists_rules() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        let expected = "NAME    ISSUER  SECONDS  PREFIX  CLAIMS                         SCOPES\n\
                        deploy  forge   600      robot   ref=main or next, sub=repo:x  artifact.*, blob.read\n";
        assert_eq!(
            text.split_whitespace().collect::<Vec<_>>(),
            expected.split_whitespace().collect::<Vec<_>>()
        );
        assert_eq!(text.lines().count(), 2);
    }

    #[test]
    fn shows_the_claims_of_a_rule() {
        let text = details(from_value(example()).unwrap()).render(None);
        assert!(text.contains("claim ref  main or next\n") && text.contains("seconds    600\n"), "{text}");
    }

    #[test]
    fn several_values_of_a_claim_are_a_list() {
        let claims = ["sub=a=b", "ref=main", "ref=next"].map(|text| parse_claim(text).unwrap());
        assert_eq!(json!(bind_claims(claims.into())), json!({ "sub": "a=b", "ref": ["main", "next"] }));
        for text in ["sub", "=x", "sub="] {
            assert!(parse_claim(text).is_err(), "{text}");
        }
    }

    #[test]
    fn update_keeps_unchanged_terms() {
        let changes = RuleChanges {
            issuer: None,
            claims: vec![],
            scopes: vec!["node.read".into()],
            ttl: None,
            prefix: None,
        };
        let terms = changes.apply_to(from_value(example()).unwrap());
        assert_eq!(
            (terms.scopes, terms.key_ttl, terms.bound_claims.len()),
            (vec!["node.read".into()], 600, 2)
        );
    }
}
