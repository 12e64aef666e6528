//! `muster rule`.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use muster_types::rule::{BoundClaims, Matcher, RuleRecord, RuleTerms};

use super::Session;
use super::events::{self, Which};
use crate::api::Object;
use crate::output::Table;

/// The commands about which tokens can be exchanged for which keys.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the mapping rules of a namespace
    List { namespace: String },
    /// Show one rule
    Show { namespace: String, name: String },
    /// Add a rule
    Create {
        namespace: String,
        name: String,
        /// Name of the issuer whose tokens are accepted
        #[arg(long)]
        issuer: String,
        /// What a token must claim; several values for one name: one of them
        #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = claim, required = true)]
        claims: Vec<(String, String)>,
        /// What the keys may be used for, such as artifact.read or artifact.*
        #[arg(long = "scope", value_name = "SCOPE", required = true)]
        scopes: Vec<String>,
        /// How long the keys live, a day at most
        #[arg(long, value_name = "SECONDS")]
        ttl: i64,
        /// How the names of the keys begin
        #[arg(long)]
        prefix: String,
    },
    /// Change what is given, and keep the rest
    Update {
        namespace: String,
        name: String,
        #[command(flatten)]
        changes: Changes,
    },
    /// Delete a rule; the keys that it made stay
    Delete { namespace: String, name: String },
    /// Events of a rule, such as the exchanges that it refused
    Events {
        namespace: String,
        name: String,
        #[command(flatten)]
        which: Which,
    },
}

/// What is to be different.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Changes {
    /// Name of the issuer whose tokens are accepted
    #[arg(long)]
    issuer: Option<String>,
    /// What a token must claim, in place of all that it had to claim before
    #[arg(long = "claim", value_name = "NAME=VALUE", value_parser = claim)]
    claims: Vec<(String, String)>,
    /// What the keys may be used for, in place of all scopes before
    #[arg(long = "scope", value_name = "SCOPE")]
    scopes: Vec<String>,
    /// How long the keys live, a day at most
    #[arg(long, value_name = "SECONDS")]
    ttl: Option<i64>,
    /// How the names of the keys begin
    #[arg(long)]
    prefix: Option<String>,
}

impl Changes {
    /// The terms of a rule with the changes made.
    fn applied_to(self, now: RuleRecord) -> RuleTerms {
        RuleTerms {
            issuer: self.issuer.unwrap_or(now.issuer),
            bound_claims: if self.claims.is_empty() { now.bound_claims } else { bound(self.claims) },
            scopes: if self.scopes.is_empty() { now.scopes } else { self.scopes },
            key_ttl: self.ttl.unwrap_or(now.key_ttl),
            key_name_prefix: self.prefix.unwrap_or(now.key_name_prefix),
        }
    }
}

/// A claim and a value of it. Values may contain the sign between them, names cannot.
fn claim(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// Claims by name: one value is meant alone, several are meant to be chosen from.
fn bound(claims: Vec<(String, String)>) -> BoundClaims {
    let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in claims {
        values.entry(name).or_default().push(value);
    }
    let matcher = |mut values: Vec<String>| match values.pop() {
        Some(only) if values.is_empty() => Matcher::One(only),
        last => {
            values.extend(last);
            Matcher::Any(values)
        }
    };
    values.into_iter().map(|(name, values)| (name, matcher(values))).collect()
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace } => session.show(client.rules(&namespace).await?, table),
        Command::Show { namespace, name } => session.show(client.rule(&namespace, &name).await?, facts),
        Command::Create { namespace, name, issuer, claims, scopes, ttl, prefix } => {
            let bound_claims = bound(claims);
            let terms = RuleTerms { issuer, bound_claims, scopes, key_ttl: ttl, key_name_prefix: prefix };
            session.show(client.create_rule(&namespace, &name, &terms).await?, facts)
        }
        Command::Update { namespace, name, changes } => {
            let terms = changes.applied_to(client.rule(&namespace, &name).await?.value()?);
            session.show(client.update_rule(&namespace, &name, &terms).await?, facts)
        }
        Command::Delete { namespace, name } => {
            let answer = client.delete_rule(&namespace, &name).await?;
            session.done(&answer, &format!("rule {name} deleted"))
        }
        Command::Events { namespace, name, which } => {
            events::show(session, Object::Rule(&namespace, &name), &which).await
        }
    }
}

fn values(matcher: &Matcher) -> String {
    match matcher {
        Matcher::One(value) => value.clone(),
        Matcher::Any(values) => values.join(" or "),
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

fn facts(rule: RuleRecord) -> Table {
    let claims = rule.bound_claims.iter().map(|(name, matcher)| (format!("claim {name}"), values(matcher)));
    let facts = [
        ("uuid", rule.uuid.to_string()),
        ("namespace", rule.namespace),
        ("name", rule.name),
        ("state", rule.state.to_string()),
        ("issuer", rule.issuer),
        ("scopes", rule.scopes.join(", ")),
        ("seconds", rule.key_ttl.to_string()),
        ("prefix", rule.key_name_prefix),
    ];
    Table::facts(facts.map(|(name, value)| (name.to_owned(), value)).into_iter().chain(claims))
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
    fn rules_are_listed_one_a_line() {
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
    fn one_rule_is_shown_with_its_claims() {
        let text = facts(from_value(example()).unwrap()).render(None);
        assert!(text.contains("claim ref  main or next\n") && text.contains("seconds    600\n"), "{text}");
    }

    #[test]
    fn several_values_of_one_claim_are_a_list() {
        let claims = ["sub=a=b", "ref=main", "ref=next"].map(|text| claim(text).unwrap());
        assert_eq!(json!(bound(claims.into())), json!({ "sub": "a=b", "ref": ["main", "next"] }));
        for text in ["sub", "=x", "sub="] {
            assert!(claim(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_not_changed_stays() {
        let changes = Changes {
            issuer: None,
            claims: vec![],
            scopes: vec!["node.read".into()],
            ttl: None,
            prefix: None,
        };
        let terms = changes.applied_to(from_value(example()).unwrap());
        assert_eq!(
            (terms.scopes, terms.key_ttl, terms.bound_claims.len()),
            (vec!["node.read".into()], 600, 2)
        );
    }
}
