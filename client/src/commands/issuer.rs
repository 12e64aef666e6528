//! `muster issuer`.

use clap::{Args, Subcommand};
use muster_types::issuer::{IssuerRecord, IssuerTerms};

use super::Session;
use super::events::{self, Which};
use crate::api::Object;
use crate::output::Table;

/// The commands about whose tokens can be exchanged for keys.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the trusted issuers
    List,
    /// Show one issuer
    Show { name: String },
    /// Trust an issuer
    Create {
        name: String,
        /// What its tokens name as their issuer, to the letter
        #[arg(long, value_name = "URL")]
        issuer_url: String,
        /// Where the keys are that sign its tokens; HTTPS
        #[arg(long, value_name = "URL")]
        jwks_uri: String,
        /// Whom its tokens must be made for
        #[arg(long)]
        audience: String,
    },
    /// Change what is given, and keep the rest
    Update {
        name: String,
        #[command(flatten)]
        changes: Changes,
    },
    /// Stop trusting an issuer; rules that name it stay
    Delete { name: String },
    /// Events of an issuer
    Events {
        name: String,
        #[command(flatten)]
        which: Which,
    },
}

/// What is to be different.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Changes {
    /// What its tokens name as their issuer, to the letter
    #[arg(long, value_name = "URL")]
    issuer_url: Option<String>,
    /// Where the keys are that sign its tokens; HTTPS
    #[arg(long, value_name = "URL")]
    jwks_uri: Option<String>,
    /// Whom its tokens must be made for
    #[arg(long)]
    audience: Option<String>,
}

impl Changes {
    /// The terms of an issuer with the changes made.
    fn applied_to(self, now: IssuerRecord) -> IssuerTerms {
        IssuerTerms {
            issuer_url: self.issuer_url.unwrap_or(now.issuer_url),
            jwks_uri: self.jwks_uri.unwrap_or(now.jwks_uri),
            audience: self.audience.unwrap_or(now.audience),
        }
    }
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List => session.show(client.issuers().await?, table),
        Command::Show { name } => session.show(client.issuer(&name).await?, facts),
        Command::Create { name, issuer_url, jwks_uri, audience } => {
            let terms = IssuerTerms { issuer_url, jwks_uri, audience };
            session.show(client.create_issuer(&name, &terms).await?, facts)
        }
        Command::Update { name, changes } => {
            let terms = changes.applied_to(client.issuer(&name).await?.value()?);
            session.show(client.update_issuer(&name, &terms).await?, facts)
        }
        Command::Delete { name } => {
            let answer = client.delete_issuer(&name).await?;
            session.done(&answer, &format!("issuer {name} deleted"))
        }
        Command::Events { name, which } => events::show(session, Object::Issuer(&name), &which).await,
    }
}

fn table(issuers: Vec<IssuerRecord>) -> Table {
    Table::new(&["NAME"], &["URL", "KEYS", "AUDIENCE"]).rows(
        issuers.into_iter().map(|issuer| [issuer.name, issuer.issuer_url, issuer.jwks_uri, issuer.audience]),
    )
}

fn facts(issuer: IssuerRecord) -> Table {
    let facts = [
        ("uuid", issuer.uuid.to_string()),
        ("name", issuer.name),
        ("state", issuer.state.to_string()),
        ("issuer URL", issuer.issuer_url),
        ("keys", issuer.jwks_uri),
        ("audience", issuer.audience),
    ];
    Table::facts(facts.map(|(name, value)| (name.to_owned(), value)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn example() -> Value {
        json!({ "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "version": 1, "metadata": {},
                "name": "forge", "issuer_url": "https://forge", "jwks_uri": "https://forge/keys", "audience": "cloud" })
    }

    #[test]
    fn issuers_are_listed_one_a_line() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        let expected = "NAME   URL            KEYS                AUDIENCE\n\
                        forge  https://forge  https://forge/keys  cloud\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_issuer_is_shown_with_everything() {
        let text = facts(from_value(example()).unwrap()).render(None);
        assert!(
            text.contains("issuer URL  https://forge\n") && text.contains("audience    cloud\n"),
            "{text}"
        );
    }

    #[test]
    fn what_is_not_changed_stays() {
        let changes = Changes { issuer_url: None, jwks_uri: None, audience: Some("other".into()) };
        let terms = changes.applied_to(from_value(example()).unwrap());
        assert_eq!((terms.issuer_url.as_str(), terms.audience.as_str()), ("https://forge", "other"));
    }
}
