//! `muster ssh`: opens an SSH session to an instance with the program `ssh`.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use muster_types::interface::InterfaceRecord;
use serde_json::{Map, Value};

use super::arguments::shell_quote;
use super::lookup::{NamedType, resolve};
use super::session::Session;
use crate::api::ApiResponse;
use crate::credentials::{self, default_data_dir, state_dir, write_private};
use crate::error_text::io_error_text;
use crate::output::escape_control;

/// Arguments of `muster ssh`.
#[derive(Debug, Args)]
#[command(
    after_help = "Connects to the floating address of the instance if it has one, else to its first address, which must be reachable \
                  from this host. A cluster without root is reached through its own namespaces. If the agent in the guest reports the SSH host keys, the server is verified with them. \
                  Exits with the code of ssh."
)]
pub struct Arguments {
    /// Name or id of the instance
    instance: String,
    /// User in the guest
    #[arg(short, long, default_value = "root")]
    login: String,
    /// Identity file (private key)
    #[arg(short, long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Only print the command
    #[arg(long)]
    print: bool,
    /// Command to run instead of a shell, and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Replaces this process by ssh.
pub(super) async fn run(
    mut arguments: Arguments,
    credentials: Option<PathBuf>,
    session: &Session,
) -> anyhow::Result<()> {
    let client = &session.client;
    resolve(client, NamedType::Instance, &mut arguments.instance, None).await?;
    let instance = client.instance(&arguments.instance).await?.value()?;
    let address = address(&instance.interfaces)
        .with_context(|| format!("instance {} has no address", escape_control(&instance.name)))?;
    // A guest without an agent has no facts, and is verified as any other host.
    let facts = client.guest_facts(&instance.uuid.to_string()).await.and_then(ApiResponse::value).ok();
    let alias = format!("muster-{}", instance.uuid);
    let known = facts.and_then(|facts| known_hosts(&alias, &facts));
    let known = known.map(|lines| save_known_hosts(&alias, &lines)).transpose()?.flatten();
    let proxy = match rootless_dir(credentials.as_deref(), client.url()) {
        Some(dir) => Some(proxy_command(&std::env::current_exe()?, &dir)?),
        None => None,
    };
    let words = ssh_words(&arguments, address, &alias, known.as_ref(), proxy)?;
    if arguments.print {
        let words: Vec<String> = words.iter().map(|word| shell_quote(word)).collect();
        return crate::output::print(&format!("ssh {}\n", words.join(" ")));
    }
    let error = Command::new("ssh").args(words).exec();
    Err(anyhow!("cannot run ssh: {}", io_error_text(&error)))
}

/// Returns the data directory of the rootless cluster on this host with the API at a URL. Its addresses are reachable only through
/// the socket there. `credentials` is the file that the user gave.
fn rootless_dir(credentials: Option<&Path>, url: &str) -> Option<PathBuf> {
    let given = credentials.and_then(Path::parent).map(Path::to_owned);
    let mut dirs = given.into_iter().chain([default_data_dir()]);
    let is_rootless = |dir: &PathBuf| UnixStream::connect(dir.join("forward.sock")).is_ok();
    dirs.find(|dir| credentials::is_for(&dir.join("credentials.json"), url) && is_rootless(dir))
}

/// Returns the command through which ssh reaches the addresses of a rootless cluster.
fn proxy_command(program: &Path, dir: &Path) -> anyhow::Result<String> {
    // ssh replaces %h and %p by address and port, and %% by %.
    let word = |path: &Path| {
        let path = std::path::absolute(path)?;
        let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
        anyhow::Ok(shell_quote(text).replace('%', "%%"))
    };
    Ok(format!("{} forward - %h:%p --data-dir {}", word(program)?, word(dir)?))
}

/// Returns the address to connect to.
fn address(interfaces: &[InterfaceRecord]) -> Option<Ipv4Addr> {
    let floating = interfaces.iter().find_map(|interface| interface.floating);
    floating.or_else(|| interfaces.iter().find_map(|interface| interface.ipv4))
}

/// Returns the lines of `known_hosts` with the host keys that the guest reports, or `None` if it reports none.
fn known_hosts(alias: &str, facts: &Map<String, Value>) -> Option<String> {
    let keys = facts.get("ssh-host-keys")?.as_object()?.values();
    let lines: String = keys.filter_map(|key| known_host(alias, key.as_str()?)).collect();
    (!lines.is_empty()).then_some(lines)
}

/// Returns the line of a host key. The guest is not trusted, so the line contains nothing but a type and a key.
fn known_host(alias: &str, key: &str) -> Option<String> {
    let mut words = key.split_whitespace();
    let (kind, key) = (words.next()?, words.next()?);
    let is_word =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=-.@".contains(&byte));
    (is_word(kind) && is_word(key) && !kind.starts_with('@')).then(|| format!("{alias} {kind} {key}\n"))
}

/// Writes the host keys of an instance to a file. Returns `None` for a user without a home directory.
fn save_known_hosts(alias: &str, lines: &str) -> anyhow::Result<Option<PathBuf>> {
    let Some(dir) = state_dir() else { return Ok(None) };
    let file = dir.join("known_hosts").join(alias);
    write_private(&file, lines)?;
    Ok(Some(file))
}

fn ssh_words(
    arguments: &Arguments,
    address: Ipv4Addr,
    alias: &str,
    known: Option<&PathBuf>,
    proxy: Option<String>,
) -> anyhow::Result<Vec<String>> {
    let path = |file: &PathBuf| -> anyhow::Result<String> {
        file.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", file.display()))
    };
    let mut words = vec!["-o".to_owned(), format!("HostKeyAlias={alias}")];
    if let Some(file) = known {
        let file = path(file)?;
        if file.contains(['"', '\n']) {
            bail!("{} cannot be given to ssh", escape_control(&file));
        }
        words.extend(["-o".to_owned(), format!("UserKnownHostsFile=\"{file}\"")]);
        words.extend(["-o".to_owned(), "StrictHostKeyChecking=yes".to_owned()]);
    }
    if let Some(proxy) = proxy {
        words.extend(["-o".to_owned(), format!("ProxyCommand={proxy}")]);
    }
    if let Some(identity) = &arguments.identity {
        words.extend(["-i".to_owned(), path(identity)?]);
    }
    words.extend(["-l".to_owned(), arguments.login.clone(), address.to_string()]);
    words.extend(arguments.command.iter().cloned());
    Ok(words)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn interface(address: &str, floating: Option<&str>) -> InterfaceRecord {
        from_value(json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "network_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a02",
            "instance_uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a03", "macaddr": "02:00:00:00:00:01", "ipv4": address,
            "order": 0, "floating": floating, "state": "created", "model": "virtio", "metadata": {}, "version": 1,
            "references_to": {}, "references_from": {}
        }))
        .unwrap()
    }

    #[test]
    fn prefers_a_floating_address() {
        let plain = interface("10.0.0.7", None);
        let floating = interface("10.0.1.7", Some("192.168.20.7"));
        assert_eq!(address(&[plain.clone(), floating]), Some(Ipv4Addr::new(192, 168, 20, 7)));
        assert_eq!(address(&[plain]), Some(Ipv4Addr::new(10, 0, 0, 7)));
        assert_eq!(address(&[]), None);
    }

    #[test]
    fn host_keys_of_a_guest_cannot_add_lines() {
        let facts = json!({ "ssh-host-keys": {
            "ed25519": "ssh-ed25519 AAAA+/= root@a\n", "evil": "@cert-authority *\nx y", "short": "ssh-rsa"
        } });
        let lines = known_hosts("muster-u", facts.as_object().unwrap());
        assert_eq!(lines.as_deref(), Some("muster-u ssh-ed25519 AAAA+/=\n"));
        assert_eq!(known_hosts("muster-u", json!({}).as_object().unwrap()), None);
    }

    #[test]
    fn known_host_keys_are_required() {
        let arguments = Arguments {
            instance: "web".into(),
            login: "debian".into(),
            identity: Some("id".into()),
            print: false,
            command: vec!["uptime".into()],
        };
        let words =
            ssh_words(&arguments, Ipv4Addr::LOCALHOST, "muster-u", Some(&"/s/u".into()), None).unwrap();
        let expected = "-o HostKeyAlias=muster-u -o UserKnownHostsFile=\"/s/u\" -o StrictHostKeyChecking=yes -i id -l debian \
                        127.0.0.1 uptime";
        assert_eq!(words.join(" "), expected);
        let proxy = proxy_command(Path::new("/bin/muster"), Path::new("/a b/50%")).unwrap();
        assert_eq!(proxy, "'/bin/muster' forward - %h:%p --data-dir '/a b/50%%'");
        let words = ssh_words(&arguments, Ipv4Addr::LOCALHOST, "muster-u", None, Some(proxy)).unwrap();
        assert!(words[3].starts_with("ProxyCommand='/bin/muster' forward - "), "{words:?}");
    }

    #[test]
    fn rootless_cluster_is_the_one_of_the_url() {
        let folder = tempfile::tempdir().unwrap();
        let (file, url) = (folder.path().join("credentials.json"), "http://127.0.0.1:1");
        let text = json!({ "namespace": "system", "key": "k", "apiurl": url }).to_string();
        std::fs::write(&file, text).unwrap();
        assert_eq!(rootless_dir(Some(&file), url), None, "it is not rootless");
        let _listener = std::os::unix::net::UnixListener::bind(folder.path().join("forward.sock")).unwrap();
        assert_eq!(rootless_dir(Some(&file), url).as_deref(), Some(folder.path()));
        assert_eq!(rootless_dir(Some(&file), "http://127.0.0.1:2"), None);
    }
}
