//! `muster login` and `muster logout`: the remembered credentials.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;
use muster_types::key::Secret;
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

use super::federated_login::{self, Federated};
use super::{Options, client, parse_secret};
use crate::api::io_text;
use crate::credentials::{self, Credentials, Places};

/// Where `muster serve` listens unless told otherwise.
const DEFAULT_URL: &str = "http://localhost:13000";

/// Arguments of `muster login`. The namespace and the address are those of the global options.
#[derive(Debug, Args)]
#[command(
    after_help = "Without --key and MUSTER_KEY the secret is asked for, or read from standard input.\n\n\
    With --federated the identity token is that of --token-file or --token-env, else of MUSTER_ID_TOKEN or \
    MUSTER_ID_TOKEN_FILE, else of the CI system: GitHub Actions, Forgejo, GitLab, Buildkite, CircleCI."
)]
pub struct Arguments {
    /// Secret of a key of the namespace
    #[arg(long, value_name = "SECRET", value_parser = parse_secret)]
    key: Option<Secret>,
    #[command(flatten)]
    federated: Federated,
}

/// Tries the credentials and, if they are good, writes them down.
pub(super) async fn log_in(arguments: Arguments, options: Options) -> anyhow::Result<()> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let namespace =
        given(options.namespace.clone()).context("no namespace to log in to: give --namespace")?;
    let apiurl = given(options.api_url.clone()).unwrap_or_else(|| DEFAULT_URL.to_owned());
    if arguments.federated.federated {
        let nobody = Credentials { namespace, key: Secret::new(""), apiurl };
        return federated_login::log_in(arguments.federated, nobody, options).await;
    }
    let file = login_file(options.credentials)?;
    let key = match arguments.key.or(options.key).filter(|key| !key.expose().is_empty()) {
        Some(key) => key,
        None => ask(&format!("key of namespace {namespace}"))?,
    };
    let credentials = Credentials { namespace, key, apiurl };
    client(credentials.clone(), options.cacert)?.log_in().await?;
    credentials::save(&file, &credentials)?;
    eprintln!("logged in to {} as namespace {}", credentials.apiurl, credentials.namespace);
    Ok(())
}

/// Forgets the credentials.
pub(super) fn log_out(options: Options) -> anyhow::Result<()> {
    let was = credentials::remove(&login_file(options.credentials)?)?;
    eprintln!("{}", if was { "logged out" } else { "was not logged in" });
    Ok(())
}

/// Where a login is remembered: in the file that is named, else in that of this user.
pub(super) fn login_file(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    let named = named.filter(|file| !file.as_os_str().is_empty());
    named
        .or_else(|| Places::of_this_user().login)
        .context("nowhere to remember a login: set HOME or XDG_CONFIG_HOME")
}

/// The secret from the terminal without showing it, or from the first line of standard input.
pub(super) fn ask(what: &str) -> anyhow::Result<Secret> {
    let mut line = String::new();
    let read = if io::stdin().is_terminal() {
        let mut out = io::stderr();
        write!(out, "{what}: ").and_then(|()| out.flush())?;
        let hidden = NoEcho::new()?;
        let read = io::stdin().read_line(&mut line);
        drop(hidden);
        // The user's own line end was not shown either.
        eprintln!();
        read
    } else {
        io::stdin().read_line(&mut line)
    };
    if let Err(error) = read {
        bail!("cannot read the key: {}", io_text(&error));
    }
    match line.trim_end_matches(['\r', '\n']) {
        "" => bail!("no key given"),
        secret => Ok(Secret::new(secret)),
    }
}

/// The terminal does not show what is typed while this lives.
struct NoEcho(Termios);

impl NoEcho {
    fn new() -> nix::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut hidden = before.clone();
        hidden.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(io::stdin(), SetArg::TCSAFLUSH, &hidden)?;
        Ok(Self(before))
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that went away.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_remembered_in_the_file_that_is_named() {
        assert_eq!(login_file(Some("/x/y.json".into())).unwrap(), PathBuf::from("/x/y.json"));
        let usual = Places::of_this_user().login;
        assert_eq!(login_file(None).ok(), usual);
        assert_eq!(login_file(Some(PathBuf::new())).ok(), usual, "an empty variable is none");
    }
}
