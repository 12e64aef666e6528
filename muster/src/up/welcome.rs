//! What is shown when a cluster is ready: where it is, and three commands to try.

use std::ffi::OsString;
use std::time::Duration;

use muster_client::api::ApiResponse;
use muster_client::credentials::CredentialFiles;
use muster_client::profiles::Profiles;
use muster_client::{Client, Options, message};

use crate::running::{CLIENT_VARIABLES, ClusterDir, quoted};

/// How long to wait until the small image is published, and the interval of the queries.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The time after which a message says what the command waits for.
const SILENCE: Duration = Duration::from_secs(1);

/// A cluster that has just been started.
#[derive(Debug)]
pub(super) struct StartedCluster<'a> {
    pub(super) dir: &'a ClusterDir,
    /// Whether the log goes to a file.
    pub(super) has_log: bool,
    pub(super) is_rootless: bool,
    pub(super) is_simulated: bool,
    /// Whether the small image is published.
    pub(super) has_image: bool,
}

impl StartedCluster<'_> {
    fn client(&self) -> Option<Client> {
        let options = Options { credentials: Some(self.dir.credentials()), ..Options::default() };
        options.client().ok()
    }

    /// Waits until the small image can be used.
    pub(super) async fn wait_for_image(&self) {
        let Some(client) = self.client().filter(|_| self.has_image) else { return };
        let published = async {
            while client.label("tiny").await.is_err() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        let announced = async {
            tokio::time::sleep(SILENCE).await;
            message!("publishing the image tiny");
            tokio::time::sleep(PUBLISH_TIMEOUT).await;
            message!("warning: the image tiny was not published; see the log");
        };
        tokio::select! {
            () = published => {}
            () = announced => {}
        }
    }

    /// Returns the text for the user.
    pub(super) async fn text(&self) -> String {
        let dir = self.dir;
        let ticket = match self.client() {
            Some(client) => {
                let ticket = client.create_login_ticket().await.and_then(ApiResponse::value).ok();
                ticket.map(|ticket| format!("{}/ui/#ticket={}", client.url(), ticket.ticket))
            }
            None => None,
        };
        let credentials = match &ticket {
            Some(_) => dir.credentials().display().to_string(),
            None => "those of SYSTEM_KEY: `muster login` saves them".to_owned(),
        };
        let url = ticket.map_or_else(
            || "see the log".to_owned(),
            |url| format!("{url} (for one login within a minute; `muster ui` prints another)"),
        );
        let log =
            if self.has_log { format!("log          {}\n", dir.log_file().display()) } else { String::new() };
        let network = if self.is_rootless {
            "network      its own, behind pasta; `muster forward PORT ADDRESS:PORT` makes a floating address reachable\n"
        } else {
            ""
        };
        let commands: String = self.commands().iter().map(|command| format!("  {command}\n")).collect();
        format!(
            "web UI       {url}\ncredentials  {credentials}\ndata         {}\n{log}{network}\nThree things to try:\n{}{commands}\n\
             Stop it with `muster down{}`.\n",
            dir.path().display(),
            self.environment(),
            dir.option()
        )
    }

    /// Returns the disk of a first instance: from the small image, from one of the internet, or an empty one.
    pub(super) fn first_disk(&self) -> &'static str {
        match (self.has_image, self.is_simulated) {
            (true, _) => "2@tiny",
            (false, true) => "2",
            (false, false) => "8@debian:12",
        }
    }

    /// Returns the commands to try. Simulated guests have no console.
    fn commands(&self) -> [String; 3] {
        let memory = if self.has_image || self.is_simulated { 256 } else { 1024 };
        [
            "muster network create lan 10.0.0.0/24 --dns".to_owned(),
            format!(
                "muster instance create web --cpus 1 --memory {memory} --disk {} --network lan",
                self.first_disk()
            ),
            if self.is_simulated { "muster why web" } else { "muster console web" }.to_owned(),
        ]
    }

    /// Returns the lines that let commands use this cluster, if they would not by themselves.
    fn environment(&self) -> String {
        let files = CredentialFiles::for_current_user();
        let selection = Selection {
            variables: [&CLIENT_VARIABLES[..], &["MUSTER_CACERT", "MUSTER_CREDENTIALS"]]
                .concat()
                .into_iter()
                .filter_map(|name| Some((name, std::env::var_os(name).filter(|value| !value.is_empty())?)))
                .collect(),
            has_profile: Profiles::for_current_user()
                .is_some_and(|profiles| !matches!(profiles.current(), Ok(None))),
            has_login: files.login.is_some_and(|file| file.exists()),
            is_default: files.daemon == self.dir.credentials(),
        };
        selection.lines(self.dir)
    }
}

/// What selects the cluster of commands.
struct Selection {
    /// The variables that are set.
    variables: Vec<(&'static str, OsString)>,
    has_profile: bool,
    has_login: bool,
    /// Whether the data directory is the one in which commands find a cluster.
    is_default: bool,
}

impl Selection {
    fn lines(self, dir: &ClusterDir) -> String {
        let is_other =
            |name: &str| CLIENT_VARIABLES.contains(&name) || (name == "MUSTER_CACERT" && dir.is_plain_http());
        let others: Vec<&str> =
            self.variables.iter().map(|(name, _)| *name).filter(|name| is_other(name)).collect();
        let mut lines = String::new();
        if !others.is_empty() {
            lines += &format!("  unset {}\n", others.join(" "));
        }
        let is_selected = match self.variables.iter().find(|(name, _)| *name == "MUSTER_CREDENTIALS") {
            Some((_, file)) => file == dir.credentials().as_os_str(),
            None => self.is_default && !self.has_login && !self.has_profile,
        };
        if !is_selected {
            lines += &format!("  export MUSTER_CREDENTIALS={}\n", quoted(&dir.credentials()));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn lines(variables: &[(&'static str, &str)], is_default: bool, has_profile: bool) -> String {
        let variables = variables.iter().map(|(name, value)| (*name, OsString::from(value))).collect();
        let selection = Selection { variables, has_profile, has_login: false, is_default };
        selection.lines(&ClusterDir::new(Path::new("/no nsense")))
    }

    #[test]
    fn names_what_selects_another_cluster() {
        let export = "  export MUSTER_CREDENTIALS='/no nsense/credentials.json'\n";
        assert_eq!(lines(&[], true, false), "");
        assert_eq!(lines(&[], false, false), export);
        assert_eq!(lines(&[], true, true), export, "another profile is in use");
        let own = ("MUSTER_CREDENTIALS", "/no nsense/credentials.json");
        assert_eq!(lines(&[own], false, true), "");
        assert_eq!(lines(&[("MUSTER_CREDENTIALS", "/other")], true, false), export);
        let variables = [("MUSTER_API_URL", "http://other"), ("MUSTER_PROFILE", "work"), own];
        assert_eq!(lines(&variables, true, false), "  unset MUSTER_API_URL MUSTER_PROFILE\n");
    }
}
