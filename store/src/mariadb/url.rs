//! The URL of a MariaDB database, which may name several servers: `mysql://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME`.

use mysql_async::Opts;

use crate::error::StoreError;

/// One server of a URL.
#[derive(Debug, Clone)]
pub(super) struct ServerAddress {
    /// `HOST:PORT`, for messages.
    pub(super) name: String,
    pub(super) opts: Opts,
}

/// Returns the servers of a URL, in the order in which they are preferred.
pub(super) fn parse(url: &str) -> Result<Vec<ServerAddress>, StoreError> {
    let invalid = || {
        StoreError::Internal(
            "the mysql: URL must be mysql://USER:PASSWORD@HOST:PORT/NAME, or have several HOST:PORT, separated by \
             commas"
                .into(),
        )
    };
    let rest = url.strip_prefix("mysql://").ok_or_else(invalid)?;
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = authority.rfind('@').map_or(("", authority), |at| authority.split_at(at + 1));
    let mut servers: Vec<ServerAddress> = Vec::new();
    for host in hosts.split(',') {
        // The driver's error may contain the URL, and with it the password.
        let opts = Opts::from_url(&format!("mysql://{login}{host}{path}")).map_err(|_| invalid())?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(StoreError::Internal("the mysql: URL must end with the name of a database".into()));
        }
        let name = format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port());
        if host.is_empty() || servers.iter().any(|server| server.name == name) {
            let problem = if host.is_empty() { "an empty host".to_owned() } else { format!("{name} twice") };
            return Err(StoreError::Internal(format!("the mysql: URL names {problem}")));
        }
        servers.push(ServerAddress { name, opts });
    }
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(url: &str) -> Vec<String> {
        parse(url).unwrap().into_iter().map(|server| server.name).collect()
    }

    #[test]
    fn reads_one_or_several_hosts() {
        assert_eq!(names("mysql://me:pw@db/muster"), ["db:3306"]);
        assert_eq!(names("mysql://root@127.0.0.1:3307/muster?socket=/run/s.sock"), ["127.0.0.1:3307"]);
        let url = "mysql://me:p,w@a:3307,b,[fd00::1]:3308/muster?prefer_socket=false";
        assert_eq!(names(url), ["a:3307", "b:3306", "[fd00::1]:3308"]);
        for server in parse(url).unwrap() {
            assert_eq!(server.opts.pass(), Some("p,w"));
            assert_eq!(server.opts.db_name(), Some("muster"));
        }
    }

    #[test]
    fn rejects_malformed_urls_without_showing_the_password() {
        for url in [
            "mysql:me:hunter2@a/x",
            "mysql://me:hunter2@a",
            "mysql://me:hunter2@a,/x",
            "mysql://me:hunter2@a,b,a:3306/x",
            "mysql://me:hunter2@a:x,b/x",
            "mysql://me:hunter2@a,b/x?unknown=1",
        ] {
            let error = parse(url).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{url}: {error}");
        }
    }
}
